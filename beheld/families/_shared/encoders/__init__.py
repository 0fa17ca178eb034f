"""What encoders of BERT's shape have in common."""
