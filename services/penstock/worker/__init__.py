"""Process: runs handlers. It needs two queues and no database."""
