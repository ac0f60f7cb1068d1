-- What stands still while generations come and go (ADR 29): the list of them, and beside it a view for each table of
-- the one that is live. A generation is a schema of its own: wb_g1, wb_g2 …
CREATE TABLE generations (
    generation INTEGER PRIMARY KEY,
    live       BOOLEAN NOT NULL DEFAULT false,
    made       TIMESTAMPTZ NOT NULL DEFAULT now()
);

-- The pointer: one generation at most is live.
CREATE UNIQUE INDEX generations_live ON generations (live) WHERE live;
