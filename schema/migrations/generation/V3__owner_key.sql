-- A response is found by its scope and id alone: what asks for one names neither model nor endpoint.
ALTER TABLE response_owners DROP CONSTRAINT response_owners_pkey;
ALTER TABLE response_owners ADD PRIMARY KEY (scope, response);
