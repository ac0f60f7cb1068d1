-- What keys spend is summed up as their requests come: by the frame in which they ended.
CREATE INDEX usage_events_seq ON usage_events (seq_last);
