-- What keys spend is summed up by the frame that wrote a row: that of an abandoned request is written when its writer's
-- end is known, which is long after the last of its own facts.
ALTER TABLE usage_events ADD COLUMN seq_written BIGINT;
UPDATE usage_events SET seq_written = seq_last;
ALTER TABLE usage_events ALTER COLUMN seq_written SET NOT NULL;
CREATE INDEX usage_events_written ON usage_events (seq_written);
DROP INDEX usage_events_seq;
