//! A mail server of the tests.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

/// The e-mail is taken, and its answer lost.
#[allow(dead_code)]
pub(crate) const LOST: u16 = 0;

/// The e-mail is taken with 250, and no later command of the connection is answered.
#[allow(dead_code)]
pub(crate) const SILENT: u16 = 1;

/// The e-mail is taken, and nothing is answered while its sender waits.
#[allow(dead_code)]
pub(crate) const MUTE: u16 = 3;

/// The e-mail is taken with 250, and text in Latin-1.
#[allow(dead_code)]
pub(crate) const LATIN: u16 = 2;

/// A server that speaks just enough SMTP: it answers the end of each e-mail with the last of these
/// codes that is left, then 250; with [`LOST`] it says nothing and hangs up.
pub(crate) async fn smtp(codes: &[u16]) -> (String, Arc<Mutex<Vec<String>>>) {
    smtp_at("the end", codes).await
}

/// The same, where the codes are for this command: `the end` of an e-mail, `the greeting`, `MAIL`,
/// `AUTH`, `RCPT`, `DATA`. It takes every user, and with codes for `AUTH` nobody else's e-mails.
pub(crate) async fn smtp_at(place: &'static str, codes: &[u16]) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("smtp://{}", listener.local_addr().unwrap());
    let taken = Arc::new(Mutex::new(Vec::new()));
    let codes = Arc::new(Mutex::new(codes.to_vec()));
    let seen = Arc::clone(&taken);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (seen, codes) = (Arc::clone(&seen), Arc::clone(&codes));
            tokio::spawn(async move { talk(BufReader::new(socket), &seen, place, &codes).await });
        }
    });
    (url, taken)
}

async fn talk(
    mut socket: BufReader<tokio::net::TcpStream>,
    seen: &Mutex<Vec<String>>,
    place: &str,
    codes: &Mutex<Vec<u16>>,
) -> Option<()> {
    let code_at = |here: &str, usual: u16| match here == place {
        true => codes.lock().unwrap().pop().unwrap_or(usual),
        false => usual,
    };
    let greeting = code_at("the greeting", 220);
    if greeting == LOST {
        return None;
    }
    socket.write_all(format!("{greeting} test\r\n").as_bytes()).await.ok()?;
    let mut is_known = place != "AUTH";
    loop {
        let mut line = String::new();
        if socket.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        let command = line.get(..4).unwrap_or_default().to_ascii_uppercase();
        let code = code_at(&command, if command == "DATA" { 354 } else { 250 });
        if code == LOST {
            return None;
        }
        let answer = match command.as_str() {
            // A refusal by policy.
            _ if code == 554 => "554 5.7.1 not now\r\n".to_owned(),
            _ if code >= 400 => format!("{code} not now\r\n"),
            "MAIL" if !is_known => "530 5.7.0 who are you\r\n".to_owned(),
            "DATA" => {
                socket.write_all(b"354 go on\r\n").await.ok()?;
                let mut email = String::new();
                while !email.ends_with("\r\n.\r\n") {
                    if socket.read_line(&mut email).await.ok()? == 0 {
                        return None;
                    }
                }
                let code = code_at("the end", 250);
                seen.lock().unwrap().push(email);
                if code == LOST {
                    return None;
                }
                if [SILENT, MUTE].contains(&code) {
                    let answer: &[u8] = if code == SILENT { b"250 so be it\r\n" } else { b"" };
                    socket.write_all(answer).await.ok()?;
                    while socket.read_line(&mut line).await.ok()? > 0 {}
                    return None;
                }
                if code == LATIN {
                    socket.write_all(b"250 re\xe7u\r\n").await.ok()?;
                    continue;
                }
                format!("{code} so be it\r\n")
            }
            "QUIT" => "221 bye\r\n".to_owned(),
            "EHLO" => "250-test\r\n250 AUTH PLAIN\r\n".to_owned(),
            "AUTH" => {
                is_known = true;
                "235 welcome\r\n".to_owned()
            }
            _ => "250 ok\r\n".to_owned(),
        };
        socket.write_all(answer.as_bytes()).await.ok()?;
    }
}

/// The line of each that says its identity.
pub(crate) fn message_ids(emails: &[String]) -> Vec<String> {
    let line = |email: &String| email.lines().find(|line| line.starts_with("Message-ID:")).unwrap().to_owned();
    emails.iter().map(line).collect()
}
