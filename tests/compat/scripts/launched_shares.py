"""Each process of torchrun says how many engines share this host's memory."""

from beheld.utils import env

print(f"one of {env.HOST_SHARES()}")
