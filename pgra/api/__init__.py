"""What a program imports: one class an idea, made of names, folders, lists and loaded models."""
