"""What the gateway costs, measured beside other proxies on the same machine in the same run."""
