"""Stage 4, which only a test has: answers that people found good are made likelier, bad ones less likely."""
