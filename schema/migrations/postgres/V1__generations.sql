-- What stands still while generations come and go (ADR 29): the list of them, and beside it a view for each table of
-- the one that is live. A generation is a schema of its own: wb_g1, wb_g2 …
-- `before` is the generation that was live when this one went live: the way back. One without `since` never was live.
CREATE TABLE generations (
    generation INTEGER PRIMARY KEY,
    live       BOOLEAN NOT NULL DEFAULT false,
    before     INTEGER,
    made       TIMESTAMPTZ NOT NULL DEFAULT now(),
    since      TIMESTAMPTZ
);

-- The pointer: one generation at most is live.
CREATE UNIQUE INDEX generations_live ON generations (live) WHERE live;
