"""Process: claims due tasks by priority and sends them, no more than the window allows."""
