"""What a simulation says: figures, sentences, pictures, and how far it is meanwhile."""
