"""How mote, the embedded default model, is made: renderer, data, training, evaluation."""
