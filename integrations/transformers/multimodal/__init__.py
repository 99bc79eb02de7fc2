"""What travels with a row besides its tokens: pictures, sounds, and what belongs to them."""
