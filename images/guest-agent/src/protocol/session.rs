//! Commands that need no guest, and what is allowed when.

use serde_json::{Value, json};

use super::command::Command;
use super::fault::Fault;
use super::lines::{Item, Lines, MAX_REQUEST};
use super::request::{Answers, Asked, COMMANDS, Request, read};

/// What is written before the answer to `guest-sync-delimited`.
const DELIMITER: u8 = 0xff;

/// What carries commands out.
pub trait Handler {
    /// Whether file systems are frozen: commands that might wait for them are refused then.
    fn is_frozen(&self) -> bool;

    /// Carries a command out; returns what the answer has.
    ///
    /// # Errors
    /// Why not.
    fn handle(&mut self, command: Command) -> Result<Value, Fault>;
}

/// The guest's side of the port.
#[derive(Debug)]
pub struct Session {
    lines: Lines,
}

impl Default for Session {
    fn default() -> Self {
        Self::with_limit(MAX_REQUEST)
    }
}

impl Session {
    /// Takes requests of up to so many bytes.
    #[must_use]
    pub fn with_limit(most: usize) -> Self {
        Self {
            lines: Lines::of(most),
        }
    }

    /// Forgets a request of which a part has come: the host is another one.
    pub fn forget(&mut self) {
        self.lines.forget();
    }

    /// Takes bytes up to the end of the next request; returns how many, and the answer if there is
    /// one.
    pub fn take(&mut self, bytes: &[u8], handler: &mut impl Handler) -> (usize, Option<Vec<u8>>) {
        let (count, item) = self.lines.take(bytes);
        let answer = match item {
            None => None,
            Some(Item::TooLong) => {
                let most = self.lines.most();
                let fault = Fault::new(format!("a request has at most {most} bytes"));
                Some(failed(&fault, None))
            }
            Some(Item::Line(line)) => match read(&line) {
                Err((fault, id)) => Some(failed(&fault, id)),
                Ok(request) => {
                    // It may be large, and what it asks for takes memory, too.
                    drop(line);
                    answer(request, handler)
                }
            },
        };
        (count, answer)
    }
}

fn answer(request: Request, handler: &mut impl Handler) -> Option<Vec<u8>> {
    let Request { name, asked, id } = request;
    let known = COMMANDS.iter().find(|known| known.name == name)?;
    if handler.is_frozen() && !known.is_for_frozen {
        let fault = Fault::not_found(format!(
            "The command {name} is disabled while file systems are frozen"
        ));
        return Some(failed(&fault, id));
    }
    let mut is_after_delimiter = false;
    let value = match asked {
        Asked::Sync { id, is_delimited } => {
            is_after_delimiter = is_delimited;
            Ok(json!(id))
        }
        Asked::Ping => Ok(json!({})),
        Asked::Info => Ok(info(handler.is_frozen())),
        Asked::Guest(command) => handler.handle(command),
    };
    match value {
        Ok(_) if known.answers == Answers::Failure => None,
        Ok(value) => {
            let mut bytes = Vec::new();
            if is_after_delimiter {
                bytes.push(DELIMITER);
            }
            line(&mut bytes, "return", value, id);
            Some(bytes)
        }
        Err(fault) => Some(failed(&fault, id)),
    }
}

fn info(is_frozen: bool) -> Value {
    let commands = COMMANDS.iter().map(|known| {
        json!({
            "name": known.name,
            "enabled": !is_frozen || known.is_for_frozen,
            "success-response": known.answers == Answers::Always,
        })
    });
    json!({
        "version": concat!("podvisor ", env!("CARGO_PKG_VERSION")),
        "supported_commands": commands.collect::<Vec<_>>(),
    })
}

fn failed(fault: &Fault, id: Option<Value>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let fault = json!({ "class": fault.class, "desc": fault.desc });
    line(&mut bytes, "error", fault, id);
    bytes
}

fn line(to: &mut Vec<u8>, key: &str, value: Value, id: Option<Value>) {
    let mut answer = serde_json::Map::new();
    answer.insert(key.to_owned(), value);
    if let Some(id) = id {
        answer.insert("id".to_owned(), id);
    }
    // Neither a vector nor values of JSON can fail.
    let _ = serde_json::to_writer(&mut *to, &Value::Object(answer));
    to.push(b'\n');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A guest that does all it is told, and remembers it.
    #[derive(Default)]
    struct Obedient {
        is_frozen: bool,
        did: Vec<Command>,
    }

    impl Handler for Obedient {
        fn is_frozen(&self) -> bool {
            self.is_frozen
        }

        fn handle(&mut self, command: Command) -> Result<Value, Fault> {
            match command {
                Command::Freeze(_) => self.is_frozen = true,
                Command::Thaw => self.is_frozen = false,
                Command::GetHostName => return Err(Fault::new("it has none")),
                _ => {}
            }
            self.did.push(command);
            Ok(json!({}))
        }
    }

    fn all(session: &mut Session, guest: &mut Obedient, mut bytes: &[u8]) -> Vec<u8> {
        let mut answers = Vec::new();
        while !bytes.is_empty() {
            let (count, answer) = session.take(bytes, guest);
            answers.extend(answer.into_iter().flatten());
            bytes = &bytes[count..];
        }
        answers
    }

    fn said(bytes: &[u8]) -> String {
        let mut guest = Obedient::default();
        let answers = all(&mut Session::default(), &mut guest, bytes);
        String::from_utf8_lossy(&answers).into_owned()
    }

    #[test]
    fn a_host_that_comes_anew_finds_the_agent_in_step() {
        let mut guest = Obedient::default();
        let bytes = b"{\"execute\": \"guest-fsfre\xff\
                      {\"execute\": \"guest-sync-delimited\", \"arguments\": {\"id\": 7}}\n";
        let answer = all(&mut Session::default(), &mut guest, bytes);
        assert_eq!(answer, b"\xff{\"return\":7}\n");
        assert_eq!(guest.did, []);
    }

    #[test]
    fn each_request_has_one_answer_but_for_a_shutdown_that_succeeds() {
        let ping = "{\"execute\": \"guest-ping\", \"id\": 1}\n";
        assert_eq!(said(ping.as_bytes()), "{\"id\":1,\"return\":{}}\n");
        assert_eq!(said(b"{\"execute\": \"guest-shutdown\"}\n"), "");
        let refused = said(b"{\"execute\": \"guest-get-host-name\"}\n");
        assert_eq!(
            refused,
            "{\"error\":{\"class\":\"GenericError\",\"desc\":\"it has none\"}}\n"
        );
        let long = vec![b'x'; MAX_REQUEST + 1];
        let long = said(&[&long[..], b"\n", ping.as_bytes()].concat());
        assert!(
            long.contains("at most 4194304") && long.lines().count() == 2,
            "{long}"
        );
    }

    #[test]
    fn frozen_guests_thaw_and_do_nothing_else() {
        let (mut session, mut guest) = (Session::default(), Obedient::default());
        let mut ask = |guest: &mut Obedient, name: &str| {
            let line = format!("{{\"execute\": \"{name}\"}}\n");
            let answer = all(&mut session, guest, line.as_bytes());
            String::from_utf8(answer).unwrap()
        };
        ask(&mut guest, "guest-fsfreeze-freeze");
        let before = guest.did.clone();
        for known in COMMANDS.iter().filter(|known| !known.is_for_frozen) {
            let said = ask(&mut guest, known.name);
            assert!(said.contains("\"error\""), "{}: {said}", known.name);
        }
        assert_eq!(guest.did, before);
        let info = ask(&mut guest, "guest-info");
        assert!(
            info.contains(r#"{"enabled":false,"name":"guest-exec","success-response":true}"#),
            "{info}"
        );
        ask(&mut guest, "guest-fsfreeze-thaw");
        assert!(ask(&mut guest, "guest-get-users").contains("return"));
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_are_the_same_answers(
            bytes in prop::collection::vec(
                prop_oneof![
                    Just(b"{\"execute\": \"guest-ping\"}\n".to_vec()),
                    Just(b"\xff".to_vec()),
                    Just(b"{\n".to_vec()),
                    prop::collection::vec(any::<u8>(), 0..8),
                ],
                0..12,
            ),
            size in 1_usize..40,
        ) {
            let bytes = bytes.concat();
            let whole = all(&mut Session::with_limit(40), &mut Obedient::default(), &bytes);
            let (mut session, mut guest) = (Session::with_limit(40), Obedient::default());
            let pieces: Vec<u8> = bytes
                .chunks(size)
                .flat_map(|piece| all(&mut session, &mut guest, piece))
                .collect();
            prop_assert_eq!(&whole, &pieces);
            for line in whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                let line = line.strip_prefix(&[DELIMITER]).unwrap_or(line);
                prop_assert!(serde_json::from_slice::<Value>(line).is_ok());
            }
        }
    }
}
