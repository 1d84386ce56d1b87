"""Cases as data: what a trainer is given, what is done to it, what damage, what each platform requires."""
