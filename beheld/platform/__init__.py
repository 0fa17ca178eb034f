"""The only code that asks which device this is: `cpu.py` and `cuda.py` behind one protocol, `platform.py`.

Nothing is imported here: `probe.py` answers what may be asked before torch is loaded.
"""
