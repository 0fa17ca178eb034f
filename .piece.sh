cp .bench/v.* /tmp/v/; ls -la /tmp/v; cat /tmp/o/steps.txt
