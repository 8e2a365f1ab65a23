"""The replica server, over real sockets and with engines that are played."""
