"""The main job from end to end: train, be killed, resume, and prove that nothing was lost."""
