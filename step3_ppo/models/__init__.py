"""The models of stage 3: what each is (roles.py), their engines, what they need of a device."""
