"""From documents to token shards: read sources, encode, write; merge parts, adopt shards of other programs."""
