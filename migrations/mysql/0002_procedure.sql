-- The SQL door: the procedure, which always exists. Patterns are \A .. \z, because $ accepts a trailing newline.
--
-- SQL SECURITY DEFINER: an application needs EXECUTE on the procedure and no right to the tables. Names are compared as binary:
-- the parameters are utf8mb4 with a binary collation, and turned into bytes before they are stored.

set session sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION';
set names utf8mb4;

drop procedure if exists oncebox_enqueue_p;

delimiter //

create procedure oncebox_enqueue_p(
  in  p_topic        longtext character set utf8mb4 collate utf8mb4_bin,
  in  p_key          longtext character set utf8mb4 collate utf8mb4_bin,
  in  p_kind         longtext character set utf8mb4 collate utf8mb4_bin,
  in  p_payload      longblob,
  in  p_content_type longtext character set utf8mb4 collate utf8mb4_bin,
  in  p_headers      longtext character set utf8mb4 collate utf8mb4_bin,
  in  p_message_id   longtext character set utf8mb4 collate utf8mb4_bin,
  out p_id           char(36) character set ascii collate ascii_bin)
  modifies sql data
  sql security definer
  comment 'oncebox: writes a message into the outbox, in the transaction of the caller'
begin
  declare v_now datetime(6) default utc_timestamp(6);
  declare v_millis bigint default timestampdiff(microsecond, '1970-01-01 00:00:00', utc_timestamp(6)) div 1000;
  declare v_topic_max, v_key_max, v_kind_max, v_headers_max, v_name_max, v_headers_bytes_max, v_type_max, v_message_max,
    v_skew, v_header_bytes bigint default 0;
  declare v_count, v_at int default 0;
  declare v_names, v_path, v_name, v_value, v_parent, v_state longtext character set utf8mb4 collate utf8mb4_bin;
  declare v_headers longtext character set utf8mb4 collate utf8mb4_bin default null;
  declare v_seen longtext character set utf8mb4 collate utf8mb4_bin default '/';
  declare v_text varchar(128) character set utf8mb4 collate utf8mb4_bin;
  declare v_hex, v_hash char(64) character set ascii collate ascii_bin;

  select min(case when name = 'topic_length_max' then least(value, 249) end),
         min(case when name = 'key_bytes_max' then value end),
         min(case when name = 'kind_bytes_max' then least(value, 255) end),
         min(case when name = 'headers_max' then value end),
         min(case when name = 'header_name_bytes_max' then least(value, 255) end),
         min(case when name = 'headers_bytes_max' then least(value, 65536) end),
         min(case when name = 'content_type_bytes_max' then least(value, 255) end),
         min(case when name = 'message_bytes_max' then value end),
         min(case when name = 'id_skew_seconds' then value end)
    into v_topic_max, v_key_max, v_kind_max, v_headers_max, v_name_max, v_headers_bytes_max, v_type_max, v_message_max, v_skew
    from oncebox_limits;
  if v_topic_max + v_key_max + v_kind_max + v_headers_max + v_name_max + v_headers_bytes_max + v_type_max + v_message_max + v_skew is null then
    signal sqlstate '45000' set message_text = 'oncebox: a row of oncebox_limits is missing; `oncebox migrate print` shows all';
  end if;

  if p_topic is null or length(p_topic) > v_topic_max or not p_topic regexp '\\A[A-Za-z0-9._-]+\\z' then
    set v_text = concat('oncebox: limit topic: a topic has 1 to ', v_topic_max, ' characters of A-Z, a-z, 0-9, . _ -');
    signal sqlstate '45000' set message_text = v_text;
  end if;
  if p_topic in ('.', '..') then
    signal sqlstate '45000' set message_text = 'oncebox: limit topic: a topic is not `.` or `..`';
  end if;
  if p_key is not null and (length(p_key) not between 1 and v_key_max or instr(cast(p_key as binary), x'00') > 0) then
    set v_text = concat('oncebox: limit key: has ', length(p_key), ' bytes, 1 to ', v_key_max, ' without NUL are allowed');
    signal sqlstate '45000' set message_text = v_text;
  end if;
  if p_kind is null or length(p_kind) not between 1 and v_kind_max or instr(cast(p_kind as binary), x'00') > 0 then
    set v_text = concat('oncebox: limit kind: 1 to ', v_kind_max, ' bytes without NUL are allowed');
    signal sqlstate '45000' set message_text = v_text;
  end if;
  if p_payload is null then
    signal sqlstate '45000' set message_text = 'oncebox: limit payload: a payload is not null; it may be empty';
  end if;
  set p_content_type = coalesce(p_content_type, 'application/json');
  if length(p_content_type) > v_type_max or not p_content_type regexp '\\A[ -~]+\\z' then
    set v_text = concat('oncebox: limit content_type: 1 to ', v_type_max, ' bytes of printable ASCII are allowed');
    signal sqlstate '45000' set message_text = v_text;
  end if;

  if p_headers is not null then
    if not coalesce(json_valid(p_headers), 0) then
      signal sqlstate '45000' set message_text = 'oncebox: limit headers: not JSON; headers are an object of strings';
    end if;
    if json_type(p_headers) <> 'OBJECT' then
      signal sqlstate '45000' set message_text = 'oncebox: limit headers: headers are a JSON object of strings';
    end if;
    set v_names = json_keys(p_headers), v_count = json_length(p_headers);
    -- Where the server keeps a name given twice (MariaDB), it counts it twice and names it once.
    if v_count <> json_length(v_names) then
      signal sqlstate '45000' set message_text = 'oncebox: limit header_twice: a header is given twice';
    end if;
    -- The trace context is no header of the application: two more may be given.
    if v_count > v_headers_max + 2 then
      set v_text = concat('oncebox: limit headers_max: ', v_count, ' headers, at most ', v_headers_max, ' are allowed');
      signal sqlstate '45000' set message_text = v_text;
    end if;
    set v_count = 0;
    while v_at < json_length(v_names) do
      set v_name = json_unquote(json_extract(v_names, concat('$[', v_at, ']')));
      set v_path = concat('$.', json_extract(v_names, concat('$[', v_at, ']')));
      set v_at = v_at + 1;
      if json_type(json_extract(p_headers, v_path)) <> 'STRING' then
        signal sqlstate '45000' set message_text = 'oncebox: limit header_value: the value of a header is a JSON string';
      end if;
      set v_value = json_unquote(json_extract(p_headers, v_path));
      if v_name is null or length(v_name) not between 1 and v_name_max or instr(cast(v_name as binary), x'00') > 0 then
        set v_text = concat('oncebox: limit header_name: a name has 1 to ', v_name_max, ' bytes without NUL');
        signal sqlstate '45000' set message_text = v_text;
      end if;
      if v_value is null or instr(cast(v_value as binary), x'00') > 0 then
        signal sqlstate '45000' set message_text = 'oncebox: limit header_value: the value of a header contains NUL';
      end if;
      if instr(v_seen, concat('/', hex(lower(v_name)), '/')) > 0 then
        signal sqlstate '45000' set message_text = 'oncebox: limit header_twice: a header is given twice';
      end if;
      set v_seen = concat(v_seen, hex(lower(v_name)), '/');
      if lower(v_name) = 'traceparent' then
        set v_parent = v_value;
      elseif lower(v_name) = 'tracestate' then
        set v_state = v_value;
      else
        if lower(v_name) regexp '\\A(ce_|cloudevents|oncebox-|x-(first-death|last-death|opt|stream)-|x-shovelled|x-(death|delivery-count|acquired-count|match|priority|received-from|original-exchange|original-routing-key|routed-by)\\z|timestamp_in_ms\\z|content-type\\z|cc\\z|bcc\\z)' then
          set v_text = concat('oncebox: limit header_reserved: the header name `', left(v_name, 40), '` is reserved');
          signal sqlstate '45000' set message_text = v_text;
        end if;
        set v_headers = json_insert(coalesce(v_headers, '{}'), v_path, v_value);
        set v_count = v_count + 1, v_header_bytes = v_header_bytes + length(v_name) + length(v_value);
      end if;
    end while;
    if v_count > v_headers_max then
      set v_text = concat('oncebox: limit headers_max: ', v_count, ' headers, at most ', v_headers_max, ' are allowed');
      signal sqlstate '45000' set message_text = v_text;
    end if;
    if v_header_bytes > v_headers_bytes_max then
      set v_text = concat('oncebox: limit headers_bytes_max: headers have ', v_header_bytes, ' bytes, at most ', v_headers_bytes_max, ' are allowed');
      signal sqlstate '45000' set message_text = v_text;
    end if;
  end if;

  if v_parent is not null and (not v_parent regexp '\\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\\z'
      or v_parent regexp '\\A(ff|..-0{32}|..-.{32}-0{16})') then
    signal sqlstate '45000' set message_text = 'oncebox: limit trace: the header traceparent is not of the W3C form';
  end if;
  if v_parent is null or length(v_state) > 512 or not v_state regexp '\\A[\\x01-\\x7f]+\\z' then
    set v_state = null;
  end if;

  if coalesce(length(p_key), 0) + v_header_bytes + length(p_payload) > v_message_max then
    set v_text = concat('oncebox: limit message_bytes_max: ', coalesce(length(p_key), 0) + v_header_bytes + length(p_payload),
      ' bytes in key, headers and payload, at most ', v_message_max, ' are allowed');
    signal sqlstate '45000' set message_text = v_text;
  end if;

  if p_message_id is null then
    -- UUID v7. random_bytes() is missing before MariaDB 10.10: uniqueness comes from uuid(), spread by SHA-256.
    set v_hash = sha2(concat(uuid(), '/', rand(), '/', rand(), '/', connection_id()), 256);
    set v_hex = concat(lpad(lower(hex(v_millis)), 12, '0'), '7', substr(v_hash, 1, 3),
      substr('89ab', 1 + conv(substr(v_hash, 4, 1), 16, 10) div 4, 1), substr(v_hash, 5, 15));
  else
    if not lower(p_message_id) regexp '\\A[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\\z' then
      signal sqlstate '45000' set message_text = 'oncebox: limit message_id: an id is a UUID of 36 characters';
    end if;
    set v_hex = lower(replace(p_message_id, '-', ''));
    if substr(v_hex, 13, 1) = '7' and substr(v_hex, 17, 1) in ('8', '9', 'a', 'b')
        and abs(cast(conv(substr(v_hex, 1, 12), 16, 10) as signed) - v_millis) > v_skew * 1000 then
      set v_text = concat('oncebox: limit id_skew_seconds: the time in the id is more than ', v_skew, ' s from the database clock');
      signal sqlstate '45000' set message_text = v_text;
    end if;
  end if;

  insert into oncebox_outbox
    (bucket, message_id, topic, `key`, kind, headers, payload, content_type, traceparent, tracestate, created_at)
    values
    (conv(left(sha2(case when p_key is null then unhex(v_hex) else cast(p_key as binary) end, 256), 2), 16, 10), unhex(v_hex),
     cast(p_topic as binary), cast(p_key as binary), cast(p_kind as binary), v_headers, p_payload, p_content_type, v_parent,
     v_state, v_now);
  set p_id = concat_ws('-', substr(v_hex, 1, 8), substr(v_hex, 9, 4), substr(v_hex, 13, 4), substr(v_hex, 17, 4), substr(v_hex, 21, 12));
end
//

delimiter ;

insert ignore into oncebox_migration (version, description, serves_from, applied_at) values (2, 'the procedure oncebox_enqueue_p', 2, utc_timestamp(6));
