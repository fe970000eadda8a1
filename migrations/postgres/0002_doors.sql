-- The doors: the only way into the outbox. `oncebox_app` may call them and has no other right.
--
-- What can never be sent is refused here, in the caller's transaction, as `oncebox: limit NAME: detail`. The same functions check
-- for every door, so that all have the same limits; the values are rows of oncebox.limits.
--
-- A function that begins with `return` is bound to its operators when it is made, and becomes part of the statement that calls it.
-- A door is therefore made of such functions and of names with their schema: that costs less than a search path of its own, and a
-- search path of the caller changes nothing.

-- A UUID of version 7 from the clock of the database and an end, `7xxx-yxxx-xxxxxxxxxxxx`. The leading zero lasts until the year 2527.
create function oncebox.uuid_v7(random_end text) returns uuid
language sql volatile parallel safe
return ('0' || to_hex((date_part('epoch', clock_timestamp()) * 1000)::bigint) || random_end)::uuid;
comment on function oncebox.uuid_v7(text) is 'a new time-ordered id with the end that is given';

create function oncebox.uuid_v7_end() returns text
language sql volatile parallel safe
return '7' || substr(gen_random_uuid()::text, 16);
comment on function oncebox.uuid_v7_end() is 'the version and the random part of an id';

create function oncebox.uuid_v7() returns uuid
language sql volatile parallel safe
return oncebox.uuid_v7(oncebox.uuid_v7_end());
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

-- Makes is_plain() anew from the limits: it knows them as constants, so that most messages need no look at the table. A message
-- for which it is false is read by check_message(), which says the limit that is broken, or that none is. A transaction that has
-- enqueued keeps the limits that it began with.
create function oncebox.compile_limits() returns trigger
language plpgsql volatile security definer set search_path = oncebox, pg_temp as $compile$
declare
  shortest bigint;
  whole bigint;
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'oncebox: limits are changed at the isolation level `read committed`, where each change sees those before it'
      using errcode = 'object_not_in_prerequisite_state';
  end if;
  perform pg_advisory_xact_lock(x'6f6e6365626c696d'::bit(64)::bigint);
  -- Where a row is missing nothing is plain, and check_message() says so.
  select case when count(*) = 9 then min(l.value) filter (where l.name in ('topic_length_max', 'key_bytes_max', 'kind_bytes_max',
           'content_type_bytes_max')) else 0 end, coalesce(min(l.value) filter (where l.name = 'message_bytes_max'), 0)
    into shortest, whole from oncebox.limits l;
  execute format($function$
    create or replace function oncebox.is_plain(topic text, kind text, payload bytea, key text, content_type text, is_written_plainly boolean)
      returns boolean
    language sql immutable parallel safe
    return octet_length(topic || kind || coalesce(key, '') || coalesce(content_type, '')) <= %s and octet_length(payload) <= %s
      and kind <> '' and coalesce(key, '-') <> ''
      and case when is_written_plainly then topic <> '' and coalesce(content_type, '-') <> ''
               else topic ~ '^[A-Za-z0-9_-][A-Za-z0-9._-]*$' and coalesce(content_type, '-') ~ '^[ -~]+$' end
  $function$, shortest, whole - shortest);
  return null;
end
$compile$;
comment on function oncebox.compile_limits() is 'makes is_plain() from the limits, whenever they change';
create trigger compile_limits after insert or update or delete on oncebox.limits
  for each row execute function oncebox.compile_limits();
create trigger compile_no_limits after truncate on oncebox.limits
  for each statement execute function oncebox.compile_limits();
-- A subscription to another database's tables changes the limits too.
alter table oncebox.limits enable always trigger compile_limits, enable always trigger compile_no_limits;
update oncebox.limits set value = value where name = 'headers_max';
comment on function oncebox.is_plain(text, text, bytea, text, text, boolean) is 'true where a message without headers breaks no limit for certain; its topic and content type are read unless their characters are known to be right';

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
language sql immutable parallel safe
return case when octet_length(tracestate) between 1 and 512 and octet_length(tracestate) = char_length(tracestate) then tracestate end;
comment on function oncebox.usable_tracestate(text) is 'vendor state of a trace, or null where it is not 1 to 512 ASCII characters';

create function oncebox.bucket_of(key text, message_id uuid) returns smallint
language sql stable parallel safe
return get_byte(sha256(case when key is null then uuid_send(message_id) else convert_to(key, 'UTF8') end), 0)::smallint;
comment on function oncebox.bucket_of(text, uuid) is 'first byte of SHA-256 of the key, or of the 16 bytes of the id where there is no key';

-- The topic, or an error: what is_plain() does not say of a message, and whether its position was passed. A position that its relay
-- has passed would never be read: the sequence was set back. What is compared with it is the cursor as it stood before the position
-- was drawn: a stable function sees the shards as they were when the statement that calls it began.
create function oncebox.checked_topic(topic text, kind text, payload bytea, key text, headers json, content_type text,
  message_id uuid, traceparent text, id uuid, drawn bigint) returns text
language plpgsql stable set search_path = oncebox, pg_temp as $$
begin
  perform oncebox.check_message(topic, kind, payload, key, headers, content_type, message_id, traceparent, oncebox.limit_values());
  if exists (select from oncebox.shard s where oncebox.bucket_of(key, id) between s.bucket_from and s.bucket_to and drawn <= s.scanned_to) then
    perform oncebox.refuse('position', format('sequence behind cursor: the relay has passed position %s, which was drawn now, and would '
      'never read it; run `oncebox doctor --fix`', drawn));
  end if;
  return topic;
end
$$;
comment on function oncebox.checked_topic(text, text, bytea, text, json, text, uuid, text, uuid, bigint) is 'the topic, or an error that names the limit which a message or its position breaks';

-- Splits trace context from headers; what remains of them is null where nothing does.
create function oncebox.split_headers(inout headers json, inout traceparent text, inout tracestate text)
language plpgsql volatile set search_path = oncebox, pg_temp as $$
begin
  if oncebox.may_trace(headers) then
    traceparent := coalesce(oncebox.trace_header(headers, 'traceparent'), traceparent);
    tracestate := coalesce(oncebox.trace_header(headers, 'tracestate'), tracestate);
    headers := oncebox.without_trace(headers);
  elsif headers::text ~ '^\s*\{\s*\}\s*$' then
    headers := null;
  end if;
end
$$;
comment on function oncebox.split_headers(json, text, text) is 'takes trace context out of headers';

-- One message. Every door for one message ends here. What the caller gives of a new id is its end.
create function oncebox.enqueue_message(topic text, kind text, payload bytea, key text, headers json, content_type text,
  message_id uuid, traceparent text, tracestate text, random_end text default null) returns uuid
language plpgsql volatile parallel unsafe security definer as $$
declare
  id pg_catalog.uuid;
begin
  -- In both statements the topic stands behind the position, so its expression sees the one that was drawn. Neither has a clause
  -- that returns something: each partition copies it anew.
  if headers is null and traceparent is null and message_id is null then
    -- Before the position is drawn: a position that is not used is a gap for the relay.
    if oncebox.is_plain(topic, kind, payload, key, content_type, false) is not true then
      perform oncebox.checked_topic(topic, kind, payload, key, null, content_type, null, null, null, null);
    end if;
    id := oncebox.uuid_v7(coalesce(random_end, oncebox.uuid_v7_end()));
    insert into oncebox.outbox (bucket, message_id, topic, key, kind, payload, content_type)
    values (oncebox.bucket_of(key, id), id,
            case when not exists (select from oncebox.shard s
                        where s.scanned_to operator(pg_catalog.>=) pg_catalog.currval('oncebox.outbox_position_seq'))
                 then topic
                 else oncebox.checked_topic(topic, kind, payload, key, null, content_type, null, null, id,
                        pg_catalog.currval('oncebox.outbox_position_seq')) end,
            key, kind, payload, coalesce(content_type, 'application/octet-stream'));
    return id;
  end if;
  id := coalesce(message_id, oncebox.uuid_v7());
  if headers is not null then
    select s.headers, s.traceparent, s.tracestate into headers, traceparent, tracestate
      from oncebox.split_headers(headers, traceparent, tracestate) s;
  end if;
  perform oncebox.checked_topic(topic, kind, payload, key, headers, content_type, message_id, traceparent, id, null);
  insert into oncebox.outbox (bucket, message_id, topic, key, kind, headers, payload, content_type, traceparent, tracestate)
  values (oncebox.bucket_of(key, id), id,
          case when not exists (select from oncebox.shard s
                      where s.scanned_to operator(pg_catalog.>=) pg_catalog.currval('oncebox.outbox_position_seq'))
               then topic
               else oncebox.checked_topic(topic, kind, payload, key, headers, content_type, message_id, traceparent, id,
                      pg_catalog.currval('oncebox.outbox_position_seq')) end,
          key, kind, headers, payload, coalesce(content_type, 'application/octet-stream'), traceparent,
          case when traceparent is not null then oncebox.usable_tracestate(tracestate) end);
  return id;
end
$$;
comment on function oncebox.enqueue_message(text, text, bytea, text, json, text, uuid, text, text, text) is 'enqueues one message; the door of the Rust library';

-- Many messages with one statement; element n of every array belongs to message n, a null array to none. The ids come back in
-- the order of the messages, which is also the order of their positions.
create function oncebox.enqueue_all(topics text[], kinds text[], payloads bytea[], keys text[], headers json[], content_types text[],
  message_ids uuid[], traceparents text[], tracestates text[]) returns uuid[]
language plpgsql volatile parallel unsafe security definer set search_path = oncebox, pg_temp
-- A plan made for the arrays at hand costs more than the insert.
set plan_cache_mode = force_generic_plan as $$
declare
  random text := gen_random_uuid()::text;
  -- New ids of one call have one time, and count up from a random number: a random number for each costs more than a row.
  first_half text := substr(oncebox.uuid_v7('7' || substr(random, 16))::text, 1, 19);
  second_half bigint := ('x8' || left(random, 3) || right(random, 12))::bit(64)::bigint;
  ids uuid[];
  split record;
  -- A sequence may be set back at any time, so each position is compared. It is drawn in the select, because an expression in the
  -- list of values does not see what a default draws.
  passed_to bigint := coalesce((select max(s.scanned_to) from oncebox.shard s), 0);
  -- Characters of all topics and of all content types at once. Where a batch has others, each message is looked at.
  is_written_plainly boolean := array_to_string(topics, '') ~ '^[A-Za-z0-9._-]+$' and not topics && array['.', '..']
    and coalesce(array_to_string(content_types, '') ~ '^[ -~]*$', true);
begin
  if headers is not null then
    -- Counted from 1, in one dimension, and none shorter than the headers.
    headers := array(select unnest(headers));
    traceparents := array(select p.given from (select generate_series(1, cardinality(headers)), unnest(traceparents) as given) p);
    tracestates := array(select p.given from (select generate_series(1, cardinality(headers)), unnest(tracestates) as given) p);
    for i in 1 .. cardinality(headers) loop
      if headers[i] is not null then
        split := oncebox.split_headers(headers[i], traceparents[i], tracestates[i]);
        headers[i] := split.headers;
        traceparents[i] := split.traceparent;
        tracestates[i] := split.tracestate;
      end if;
    end loop;
  end if;
  ids := array(select coalesce(m.given, (first_half || to_hex(second_half + m.number))::uuid)
                 from (select generate_series(1, cardinality(topics)) as number, unnest(message_ids) as given) m);
  -- Functions that return sets step together in a list of columns, in the order of their arrays.
  insert into oncebox.outbox (written_by, position, bucket, message_id, topic, key, kind, headers, payload, content_type, traceparent, tracestate)
  select m.written_by, m.position, oncebox.bucket_of(m.key, m.id), m.id,
         case when m.position > passed_to and m.headers is null and m.given is null and m.traceparent is null
                and oncebox.is_plain(m.topic, m.kind, m.payload, m.key, m.content_type, is_written_plainly) then m.topic
              else oncebox.checked_topic(m.topic, m.kind, m.payload, m.key, m.headers, m.content_type, m.given, m.traceparent, m.id, m.position) end,
         m.key, m.kind, m.headers, m.payload, coalesce(m.content_type, 'application/octet-stream'), m.traceparent,
         case when m.traceparent is not null then oncebox.usable_tracestate(m.tracestate) end
    from (select pg_current_xact_id() as written_by, nextval('oncebox.outbox_position_seq') as position, r.*
            from (select unnest(ids) as id, unnest(message_ids) as given, unnest(topics) as topic, unnest(kinds) as kind,
                 unnest(payloads) as payload, unnest(keys) as key, unnest(headers) as headers, unnest(content_types) as content_type,
                 unnest(traceparents) as traceparent, unnest(tracestates) as tracestate) r) m;
  return ids;
end
$$;
comment on function oncebox.enqueue_all(text[], text[], bytea[], text[], json[], text[], uuid[], text[], text[]) is 'enqueues many messages with one statement; the bulk door of the Rust library';

-- The door for every language: one name, four kinds of payload. The payload has no default, else calls were ambiguous (R33).
create function oncebox.enqueue(topic text, kind text, payload text, key text default null, headers jsonb default null,
  content_type text default null, message_id uuid default null) returns uuid
language plpgsql volatile parallel unsafe security definer as $$
begin
  return oncebox.enqueue_message(topic, kind, pg_catalog.convert_to(payload, 'UTF8'), key, headers::pg_catalog.text::pg_catalog.json,
    coalesce(content_type, 'application/json'), message_id, null, null);
end
$$;
create function oncebox.enqueue(topic text, kind text, payload json, key text default null, headers jsonb default null,
  content_type text default null, message_id uuid default null) returns uuid
language plpgsql volatile parallel unsafe security definer as $$
begin
  return oncebox.enqueue_message(topic, kind, pg_catalog.convert_to(payload::pg_catalog.text, 'UTF8'), key, headers::pg_catalog.text::pg_catalog.json,
    coalesce(content_type, 'application/json'), message_id, null, null);
end
$$;
create function oncebox.enqueue(topic text, kind text, payload jsonb, key text default null, headers jsonb default null,
  content_type text default null, message_id uuid default null) returns uuid
language plpgsql volatile parallel unsafe security definer as $$
begin
  return oncebox.enqueue_message(topic, kind, pg_catalog.convert_to(payload::pg_catalog.text, 'UTF8'), key, headers::pg_catalog.text::pg_catalog.json,
    coalesce(content_type, 'application/json'), message_id, null, null);
end
$$;
create function oncebox.enqueue(topic text, kind text, payload bytea, key text default null, headers jsonb default null,
  content_type text default null, message_id uuid default null) returns uuid
language plpgsql volatile parallel unsafe security definer as $$
begin
  return oncebox.enqueue_message(topic, kind, payload, key, headers::pg_catalog.text::pg_catalog.json,
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
  oncebox.enqueue_message(text, text, bytea, text, json, text, uuid, text, text, text),
  oncebox.enqueue_all(text[], text[], bytea[], text[], json[], text[], uuid[], text[], text[])
to oncebox_app;
