"""The models of stage 3: what each is (roles.py), their engines, the actor's sampling, what they need of a device."""
