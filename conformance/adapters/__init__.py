"""One adapter per trainer under test; :data:`conformance.running.adapter.ADAPTERS` lists them."""
