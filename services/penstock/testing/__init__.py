"""A pytest plugin for programs that use Penstock: the fixtures `penstock_inline` and `penstock_pipeline`."""
