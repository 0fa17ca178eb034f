"""Programs that examine the engine from outside: verify, doctor, plan."""
