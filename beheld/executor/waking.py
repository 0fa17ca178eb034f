"""Makes the device ready beside other work: its context, and the library of products."""

from __future__ import annotations

import threading


def wake(device: str) -> threading.Thread | None:
    """Begin, if there is a GPU and `device` ("auto", "cuda" or "cpu") does not leave it out; never an error.

    Making a context takes a second or two, most of it outside the interpreter, which meanwhile imports what the model
    needs. Whatever goes wrong here goes wrong again where the device is used, and is told there.
    """
    # Here, since two threads must not import it at once.
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None

    def begin() -> None:
        try:
            one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
            (one @ one).sum().item()
        except RuntimeError:
            pass

    thread = threading.Thread(target=begin, name="beheld-wake", daemon=True)
    thread.start()
    return thread
