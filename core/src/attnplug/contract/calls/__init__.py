"""What a host calls besides `forward`: the custom op, the next step of a decode, cascade, block copies, checks."""
