"""The flags that only stage 3 has, and the methods that choose some of their defaults."""
