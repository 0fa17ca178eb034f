cp .bench/v.* /tmp/v/; cd /tmp/v; cat v.0 v.1 v.2 v.3 v.4 > all; head -c 124405820 all > vw.tar.xz; tail -c +124405821 all > deps.tar.xz; mkdir -p whl deps
tar -xJf vw.tar.xz -C whl & tar -xJf deps.tar.xz -C deps & wait; touch ready; rm all *.xz v.?; du -sh whl deps
cat /tmp/o/steps.txt
