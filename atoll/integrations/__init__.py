"""What other people's training loops need to train with others; each imported where it is used."""
