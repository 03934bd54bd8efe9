"""A network in memory and in virtual time, with everything that can go wrong in a real one."""
