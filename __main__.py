"""``python -m evenload``, and what ``torchrun -m evenload`` starts on every rank."""

from .cli import main

if __name__ == "__main__":
    main()
