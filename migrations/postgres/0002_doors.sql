-- The doors: the only way into the outbox. `oncebox_app` may call them and has no other right.
--
-- What can never be sent is refused here, in the caller's transaction, as `oncebox: limit NAME: detail`. One function checks,
-- so that every door has the same limits; the values are rows of oncebox.limits.

-- A UUID of version 7 from the clock of the database.
create function oncebox.uuid_v7() returns uuid
language sql volatile parallel safe as $$
  select encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
    placing substring(int8send(floor(date_part('epoch', clock_timestamp()) * 1000)::bigint) from 3) from 1 for 6), 52, 1), 53, 1), 'hex')::uuid
$$;
comment on function oncebox.uuid_v7() is 'a new time-ordered id, by the clock of the database';

create function oncebox.is_uuid_v7(id uuid) returns boolean
language sql immutable strict parallel safe as $$
  select substring(uuid_send(id) from 7 for 1) between '\x70' and '\x7f' and substring(uuid_send(id) from 9 for 1) between '\x80' and '\xbf'
$$;
comment on function oncebox.is_uuid_v7(uuid) is 'whether an id carries its time';

create function oncebox.uuid_v7_millis(id uuid) returns bigint
language sql immutable strict parallel safe as $$
  select ('x' || encode('\x0000'::bytea || substring(uuid_send(id) from 1 for 6), 'hex'))::bit(64)::bigint
$$;
comment on function oncebox.uuid_v7_millis(uuid) is 'milliseconds since 1970 in an id that carries its time';

create function oncebox.refuse(limit_name text, detail text) returns boolean
language plpgsql volatile as $$
begin
  raise exception 'oncebox: limit %: %', limit_name, detail using errcode = 'invalid_parameter_value';
end
$$;
comment on function oncebox.refuse(text, text) is 'raises a broken limit by its name';

-- All limits, in the order of their names.
create function oncebox.limit_values() returns bigint[]
language plpgsql stable as $$
declare
  found bigint[] := array(select l.value from oncebox.limits l order by l.name);
begin
  if cardinality(found) <> 9 then
    raise exception 'oncebox: oncebox.limits has % rows, 9 are needed', cardinality(found)
      using hint = 'Put back the row that was deleted; `oncebox migrate print` shows all of them.';
  end if;
  return found;
end
$$;
comment on function oncebox.limit_values() is 'values of all limits, in the order of their names';

-- True, or an error that names the limit. `limits` is what limit_values() gives.
create function oncebox.check_message(topic text, kind text, payload bytea, key text, headers json, content_type text,
  message_id uuid, traceparent text, limits bigint[]) returns boolean
language plpgsql volatile as $$
declare
  header record;
  seen text[] := '{}';
  header_bytes bigint := 0;
begin
  if topic is null or octet_length(topic) not between 1 and limits[9] or topic !~ '^[A-Za-z0-9._-]+$' then
    return oncebox.refuse('topic', format('a topic has 1 to %s characters of A-Z, a-z, 0-9, `.`, `_`, `-`', limits[9]));
  end if;
  if topic in ('.', '..') then
    return oncebox.refuse('topic', 'a topic is not `.` or `..`');
  end if;
  if octet_length(key) not between 1 and limits[6] then
    return oncebox.refuse('key', format('has %s bytes, 1 to %s are allowed', octet_length(key), limits[6]));
  end if;
  if kind is null or octet_length(kind) not between 1 and limits[7] then
    return oncebox.refuse('kind', format('has %s bytes, 1 to %s are allowed', coalesce(octet_length(kind), 0), limits[7]));
  end if;
  if octet_length(content_type) not between 1 and limits[1] or content_type !~ '^[ -~]+$' then
    return oncebox.refuse('content_type', format('1 to %s bytes of printable ASCII are allowed', limits[1]));
  end if;
  if payload is null then
    return oncebox.refuse('payload', 'a payload is never null; an empty one is sent as zero bytes');
  end if;
  if headers is not null then
    if json_typeof(headers) <> 'object' then
      return oncebox.refuse('headers', 'headers are an object of strings');
    end if;
    -- An escaped NUL would fail below with an error that names no limit.
    if headers::text ~ '(^|[^\\])(\\\\)*\\u0000' then
      return oncebox.refuse('header_value', 'a header contains NUL');
    end if;
    for header in select e.key as name, json_typeof(e.value) as kind, e.value #>> '{}' as value from json_each(headers) e loop
      if octet_length(header.name) not between 1 and limits[2] then
        return oncebox.refuse('header_name', format('has %s bytes, 1 to %s are allowed', octet_length(header.name), limits[2]));
      end if;
      if header.name ~* '^(ce_|cloudevents|oncebox-|x-(first-death|last-death|opt|stream)-|x-shovelled|(x-(death|delivery-count|acquired-count|match|priority|received-from|original-exchange|original-routing-key|routed-by)|timestamp_in_ms|content-type|cc|bcc)$)' then
        return oncebox.refuse('header_reserved', format('the header name `%s` is reserved', header.name));
      end if;
      if lower(header.name) = any (seen) then
        return oncebox.refuse('header_twice', format('the header `%s` is given twice', header.name));
      end if;
      if header.kind <> 'string' then
        return oncebox.refuse('header_value', format('the value of header `%s` is no string', header.name));
      end if;
      seen := seen || lower(header.name);
      header_bytes := header_bytes + octet_length(header.name) + octet_length(header.value);
    end loop;
    if cardinality(seen) > limits[4] then
      return oncebox.refuse('headers_max', format('%s headers, at most %s are allowed', cardinality(seen), limits[4]));
    end if;
    if header_bytes > limits[3] then
      return oncebox.refuse('headers_bytes_max', format('headers have %s bytes, at most %s are allowed', header_bytes, limits[3]));
    end if;
  end if;
  if coalesce(octet_length(key), 0) + header_bytes + octet_length(payload) > limits[8] then
    return oncebox.refuse('message_bytes_max', format('key, headers and payload have %s bytes, at most %s are allowed',
      coalesce(octet_length(key), 0) + header_bytes + octet_length(payload), limits[8]));
  end if;
  if traceparent !~ '^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$' then
    return oncebox.refuse('trace', 'the header `traceparent` is not of the W3C form');
  end if;
  if message_id is not null and oncebox.is_uuid_v7(message_id)
     and abs(oncebox.uuid_v7_millis(message_id) - date_part('epoch', clock_timestamp()) * 1000) > limits[5] * 1000 then
    return oncebox.refuse('id_skew_seconds', format('the time in the id %s is more than %s seconds from the clock of the database',
      message_id, limits[5]));
  end if;
  return true;
end
$$;
comment on function oncebox.check_message(text, text, bytea, text, json, text, uuid, text, bigint[]) is 'true, or an error that names the limit which a message breaks';

-- Whether headers may hold trace context; a backslash may hide it. What is no object, or holds an escaped NUL, is left to the check.
create function oncebox.may_trace(headers json) returns boolean
language sql immutable parallel safe as $$
  select headers::text ~* 'trace(parent|state)|\\' and json_typeof(headers) = 'object' and headers::text !~ '(^|[^\\])(\\\\)*\\u0000'
$$;
comment on function oncebox.may_trace(json) is 'false where headers hold no trace context for certain';

-- The value of a trace header; two of them are refused.
create function oncebox.trace_header(headers json, wanted text) returns text
language plpgsql volatile as $$
declare
  found json[] := array(select e.value from json_each(headers) e where lower(e.key) = wanted);
begin
  if cardinality(found) > 1 then
    perform oncebox.refuse('header_twice', format('the header `%s` is given twice', wanted));
  end if;
  if json_typeof(found[1]) <> 'string' then
    perform oncebox.refuse('header_value', format('the value of header `%s` is no string', wanted));
  end if;
  return found[1] #>> '{}';
end
$$;
comment on function oncebox.trace_header(json, text) is 'value of the trace header of that name, in any case';

-- All headers but trace context, in their order; null where none is left.
create function oncebox.without_trace(headers json) returns json
language sql immutable parallel safe as $$
  select json_object_agg(e.key, e.value order by e.ordinality)
    from json_each(headers) with ordinality e
   where lower(e.key) not in ('traceparent', 'tracestate')
$$;
comment on function oncebox.without_trace(json) is 'headers without trace context, in their order';

-- Vendor state is optional by its specification: what cannot travel is dropped, the trace goes on.
create function oncebox.usable_tracestate(tracestate text) returns text
language sql immutable parallel safe as $$
  select case when octet_length(tracestate) between 1 and 512 and octet_length(tracestate) = char_length(tracestate) then tracestate end
$$;
comment on function oncebox.usable_tracestate(text) is 'vendor state of a trace, or null where it is not 1 to 512 ASCII characters';

create function oncebox.bucket_of(key text, message_id uuid) returns smallint
language sql stable parallel safe as $$
  select get_byte(sha256(case when key is null then uuid_send(message_id) else convert_to(key, 'UTF8') end), 0)::smallint
$$;
comment on function oncebox.bucket_of(text, uuid) is 'first byte of SHA-256 of the key, or of the 16 bytes of the id where there is no key';

-- A position that its relay has passed would never be read: the sequence was set back. What is compared with it is the cursor as
-- it stood before the position was drawn: a statement sees the shards as they were when it began.
create function oncebox.refuse_passed(passed bigint) returns boolean
language plpgsql volatile as $$
begin
  if passed is null then
    return true;
  end if;
  return oncebox.refuse('position', format('sequence behind cursor: the relay has passed position %s, which was drawn now, and would '
    'never read it; run `oncebox doctor --fix`', passed));
end
$$;
comment on function oncebox.refuse_passed(bigint) is 'true where no position is given, else an error: the relay has passed it';

-- One message. Every door for one message ends here.
create function oncebox.enqueue_message(topic text, kind text, payload bytea, key text, headers json, content_type text,
  message_id uuid, traceparent text, tracestate text) returns uuid
language plpgsql volatile parallel unsafe security definer set search_path = oncebox, pg_temp as $$
declare
  id uuid := coalesce(message_id, oncebox.uuid_v7());
  passed bigint;
begin
  if headers is not null then
    if oncebox.may_trace(headers) then
      traceparent := coalesce(oncebox.trace_header(headers, 'traceparent'), traceparent);
      tracestate := coalesce(oncebox.trace_header(headers, 'tracestate'), tracestate);
      headers := oncebox.without_trace(headers);
    elsif headers::text ~ '^\s*\{\s*\}\s*$' then
      headers := null;
    end if;
  end if;
  perform oncebox.check_message(topic, kind, payload, key, headers, content_type, message_id, traceparent, oncebox.limit_values());
  with written as (
    insert into oncebox.outbox (bucket, message_id, topic, key, kind, headers, payload, content_type, traceparent, tracestate)
    values (oncebox.bucket_of(key, id), id, topic, key, kind, headers, payload, coalesce(content_type, 'application/octet-stream'),
            traceparent, case when traceparent is not null then oncebox.usable_tracestate(tracestate) end)
    returning position, bucket
  )
  select w.position into passed from written w join oncebox.shard s
      on w.bucket between s.bucket_from and s.bucket_to and w.position <= s.scanned_to;
  perform oncebox.refuse_passed(passed);
  return id;
end
$$;
comment on function oncebox.enqueue_message(text, text, bytea, text, json, text, uuid, text, text) is 'enqueues one message; the door of the Rust library';

-- Many messages with one statement; element n of every array belongs to message n, a null array to none. The ids come back in
-- the order of the messages, which is also the order of their positions.
create function oncebox.enqueue_all(topics text[], kinds text[], payloads bytea[], keys text[], headers json[], content_types text[],
  message_ids uuid[], traceparents text[], tracestates text[]) returns uuid[]
language plpgsql volatile parallel unsafe security definer set search_path = oncebox, pg_temp
-- A plan made for the arrays at hand costs more than the insert.
set plan_cache_mode = force_generic_plan as $$
declare
  limits bigint[] := oncebox.limit_values();
  ids uuid[];
  plain boolean;
  passed bigint;
begin
  -- Most batches break no limit, and cheap comparisons say so: patterns are matched once for each different text. Where they
  -- say no, and for what they do not look at, check_message() speaks row by row, with the name of the limit.
  select bool_and(coalesce(octet_length(m.topic) between 1 and limits[9] and octet_length(m.kind) between 1 and limits[7]
           and coalesce(octet_length(m.key), 1) between 1 and limits[6]
           and coalesce(octet_length(m.content_type), 1) between 1 and limits[1]
           and coalesce(octet_length(m.key), 0) + octet_length(m.payload) <= limits[8], false))
    into plain
    from unnest(topics, kinds, payloads, keys, content_types) m (topic, kind, payload, key, content_type);
  plain := plain
    and not exists (select from (select distinct t from unnest(topics) t) d where d.t !~ '^[A-Za-z0-9._-]+$' or d.t in ('.', '..'))
    and not exists (select from (select distinct c from unnest(content_types) c) d where d.c !~ '^[ -~]+$');
  with written as (
    insert into oncebox.outbox (bucket, message_id, topic, key, kind, headers, payload, content_type, traceparent, tracestate)
    select oncebox.bucket_of(n.key, n.id), n.id,
           case when plain and n.headers is null and n.given is null and n.traceparent is null then n.topic
                when oncebox.check_message(n.topic, n.kind, n.payload, n.key, n.headers, n.content_type, n.given, n.traceparent, limits)
             then n.topic end,
           n.key, n.kind, n.headers, n.payload, coalesce(n.content_type, 'application/octet-stream'), n.traceparent,
           case when n.traceparent is not null then oncebox.usable_tracestate(n.tracestate) end
      from (
        -- The volatile id keeps this from being merged into the outer query, so every expression runs once a row.
        select m.ordinality, coalesce(m.given, oncebox.uuid_v7()) as id, m.given, m.topic, m.kind, m.payload, m.key, m.content_type,
               case when m.headers is null or m.headers::text ~ '^\s*\{\s*\}\s*$' then null
                    when oncebox.may_trace(m.headers) then oncebox.without_trace(m.headers) else m.headers end as headers,
               case when oncebox.may_trace(m.headers)
                    then coalesce(oncebox.trace_header(m.headers, 'traceparent'), m.traceparent) else m.traceparent end as traceparent,
               case when oncebox.may_trace(m.headers)
                    then coalesce(oncebox.trace_header(m.headers, 'tracestate'), m.tracestate) else m.tracestate end as tracestate
          from unnest(topics, kinds, payloads, keys, headers, content_types, message_ids, traceparents, tracestates)
               with ordinality m (topic, kind, payload, key, headers, content_type, given, traceparent, tracestate, ordinality)
      ) n
     order by n.ordinality
    returning message_id, position, bucket
  )
  select array_agg(w.message_id), min(w.position) filter (where exists (select from oncebox.shard s
             where w.bucket between s.bucket_from and s.bucket_to and w.position <= s.scanned_to))
    into ids, passed from written w;
  perform oncebox.refuse_passed(passed);
  return coalesce(ids, '{}');
end
$$;
comment on function oncebox.enqueue_all(text[], text[], bytea[], text[], json[], text[], uuid[], text[], text[]) is 'enqueues many messages with one statement; the bulk door of the Rust library';

-- The door for every language: one name, four kinds of payload. The payload has no default, else calls were ambiguous (R33).
create function oncebox.enqueue(topic text, kind text, payload text, key text default null, headers jsonb default null,
  content_type text default null, message_id uuid default null) returns uuid
language plpgsql volatile parallel unsafe security definer set search_path = oncebox, pg_temp as $$
begin
  return oncebox.enqueue_message(topic, kind, convert_to(payload, 'UTF8'), key, headers::text::json,
    coalesce(content_type, 'application/json'), message_id, null, null);
end
$$;
create function oncebox.enqueue(topic text, kind text, payload json, key text default null, headers jsonb default null,
  content_type text default null, message_id uuid default null) returns uuid
language plpgsql volatile parallel unsafe security definer set search_path = oncebox, pg_temp as $$
begin
  return oncebox.enqueue_message(topic, kind, convert_to(payload::text, 'UTF8'), key, headers::text::json,
    coalesce(content_type, 'application/json'), message_id, null, null);
end
$$;
create function oncebox.enqueue(topic text, kind text, payload jsonb, key text default null, headers jsonb default null,
  content_type text default null, message_id uuid default null) returns uuid
language plpgsql volatile parallel unsafe security definer set search_path = oncebox, pg_temp as $$
begin
  return oncebox.enqueue_message(topic, kind, convert_to(payload::text, 'UTF8'), key, headers::text::json,
    coalesce(content_type, 'application/json'), message_id, null, null);
end
$$;
create function oncebox.enqueue(topic text, kind text, payload bytea, key text default null, headers jsonb default null,
  content_type text default null, message_id uuid default null) returns uuid
language plpgsql volatile parallel unsafe security definer set search_path = oncebox, pg_temp as $$
begin
  return oncebox.enqueue_message(topic, kind, payload, key, headers::text::json,
    coalesce(content_type, 'application/octet-stream'), message_id, null, null);
end
$$;
comment on function oncebox.enqueue(text, text, text, text, jsonb, text, uuid) is 'enqueues a message whose payload is text, kept byte for byte; returns its id';
comment on function oncebox.enqueue(text, text, json, text, jsonb, text, uuid) is 'enqueues a message whose payload is json, kept byte for byte; returns its id';
comment on function oncebox.enqueue(text, text, jsonb, text, jsonb, text, uuid) is 'enqueues a message whose payload is the text form of a jsonb; returns its id';
comment on function oncebox.enqueue(text, text, bytea, text, jsonb, text, uuid) is 'enqueues a message whose payload is bytes; returns its id';

revoke all on schema oncebox from public;
revoke execute on all functions in schema oncebox from public;
grant execute on function
  oncebox.enqueue(text, text, text, text, jsonb, text, uuid),
  oncebox.enqueue(text, text, json, text, jsonb, text, uuid),
  oncebox.enqueue(text, text, jsonb, text, jsonb, text, uuid),
  oncebox.enqueue(text, text, bytea, text, jsonb, text, uuid),
  oncebox.enqueue_message(text, text, bytea, text, json, text, uuid, text, text),
  oncebox.enqueue_all(text[], text[], bytea[], text[], json[], text[], uuid[], text[], text[])
to oncebox_app;
