"""One file a trainer; their names are in :data:`conformance.running.adapter.ADAPTERS`."""
