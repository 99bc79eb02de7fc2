"""What travels with a row beside its tokens: pictures, sounds, and what belongs to them."""
