-- The SQL door as a function. Optional: under binary logging a server refuses it (1418, 1419) unless log_bin_trust_function_creators = 1,
-- or the migrator may do as SUPER does; then only the procedure oncebox_enqueue_p exists, and `oncebox doctor` says so.
-- It is not declared deterministic: that would be a lie, and a server may call a deterministic function once for many rows.

set session sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION';
set names utf8mb4;

insert ignore into oncebox_migration (version, description, serves_from, applied_at) values (3, 'the function oncebox_enqueue, where the server allows it', 3, utc_timestamp(6));

drop function if exists oncebox_enqueue;

delimiter //

create function oncebox_enqueue(
  p_topic        longtext character set utf8mb4 collate utf8mb4_bin,
  p_key          longtext character set utf8mb4 collate utf8mb4_bin,
  p_kind         longtext character set utf8mb4 collate utf8mb4_bin,
  p_payload      longblob,
  p_content_type longtext character set utf8mb4 collate utf8mb4_bin,
  p_headers      longtext character set utf8mb4 collate utf8mb4_bin,
  p_message_id   longtext character set utf8mb4 collate utf8mb4_bin)
  returns char(36) character set ascii collate ascii_bin
  not deterministic
  modifies sql data
  sql security definer
  comment 'oncebox: writes a message into the outbox, in the transaction of the caller, and returns its id'
begin
  declare v_id char(36) character set ascii collate ascii_bin;
  call oncebox_enqueue_p(p_topic, p_key, p_kind, p_payload, p_content_type, p_headers, p_message_id, v_id);
  return v_id;
end
//

delimiter ;
