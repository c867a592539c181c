"""The device side of each wire protocol, in front of one MuJoCo process."""
