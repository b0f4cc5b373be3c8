"""Training scripts that use ckptd as a user would. Nothing in here is part of the distribution."""
