"""Features around the core, which import it through `fastq_loader.api` only; the core works without them."""
