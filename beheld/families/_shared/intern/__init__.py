"""InternViT, its projector and its tiles in InternVL's original layout, which several publishers share."""
