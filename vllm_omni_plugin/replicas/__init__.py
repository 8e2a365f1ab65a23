"""Engine replicas as the head sees them: links, the client that speaks over them, and how local ones are started."""
