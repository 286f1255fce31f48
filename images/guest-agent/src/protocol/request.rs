//! A line to a command.

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;

use super::command::{Command, Keys};
use super::fault::Fault;
use super::only;

/// Most characters of a name or id that is said again.
const QUOTED: usize = 128;

/// What a line asks for.
#[derive(Debug, PartialEq)]
pub(super) enum Asked {
    /// A number that is the answer, after the byte 0xFF or not.
    Sync { id: i64, is_delimited: bool },
    /// An answer.
    Ping,
    /// What the agent can do.
    Info,
    /// What the guest does.
    Guest(Command),
}

/// A line that was understood.
#[derive(Debug)]
pub(super) struct Request {
    /// The command's name.
    pub(super) name: &'static str,
    pub(super) asked: Asked,
    /// What the answer has again, if it is there.
    pub(super) id: Option<Value>,
}

/// When a command is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answers {
    Always,
    /// Not if it succeeds.
    Failure,
}

/// A command by its name.
pub(super) struct Known {
    pub(super) name: &'static str,
    pub(super) answers: Answers,
    /// Whether it is carried out while file systems are frozen.
    pub(super) is_for_frozen: bool,
    read: fn(&[u8]) -> Result<Asked, Fault>,
}

const fn known(name: &'static str, read: fn(&[u8]) -> Result<Asked, Fault>) -> Known {
    Known {
        name,
        answers: Answers::Always,
        is_for_frozen: false,
        read,
    }
}

/// One that writes nothing to a file system, and asks none.
const fn frozen(name: &'static str, read: fn(&[u8]) -> Result<Asked, Fault>) -> Known {
    Known {
        is_for_frozen: true,
        ..known(name, read)
    }
}

/// All commands.
pub(super) const COMMANDS: &[Known] = &[
    frozen("guest-sync-delimited", |line| sync(line, true)),
    frozen("guest-sync", |line| sync(line, false)),
    frozen("guest-ping", |line| nothing(line, Asked::Ping)),
    frozen("guest-info", |line| nothing(line, Asked::Info)),
    frozen("guest-fsfreeze-status", |line| {
        plain(line, Command::FreezeStatus)
    }),
    frozen("guest-fsfreeze-thaw", |line| plain(line, Command::Thaw)),
    known("guest-fsfreeze-freeze", |line| {
        plain(line, Command::Freeze(None))
    }),
    known("guest-fsfreeze-freeze-list", |line| {
        take(line, |it: only::MountPoints| {
            Command::Freeze(it.mountpoints)
        })
    }),
    known("guest-get-time", |line| plain(line, Command::GetTime)),
    known("guest-set-time", |line| {
        take(line, |it: only::Time| Command::SetTime(it.time))
    }),
    Known {
        answers: Answers::Failure,
        ..known("guest-shutdown", |line| {
            take(line, |it: only::Mode| Command::Shutdown(it.mode))
        })
    },
    known("guest-exec", |line| take(line, Command::Exec)),
    known("guest-exec-status", |line| {
        take(line, |it: only::Pid| Command::ExecStatus(it.pid))
    }),
    known("guest-file-open", |line| take(line, Command::FileOpen)),
    known("guest-file-read", |line| take(line, Command::FileRead)),
    known("guest-file-write", |line| take(line, Command::FileWrite)),
    known("guest-file-seek", |line| take(line, Command::FileSeek)),
    known("guest-file-flush", |line| {
        take(line, |it: only::Handle| Command::FileFlush(it.handle))
    }),
    known("guest-file-close", |line| {
        take(line, |it: only::Handle| Command::FileClose(it.handle))
    }),
    known("guest-get-users", |line| plain(line, Command::GetUsers)),
    known("guest-network-get-interfaces", |line| {
        plain(line, Command::GetInterfaces)
    }),
    known("guest-get-osinfo", |line| plain(line, Command::GetOsInfo)),
    known("guest-get-host-name", |line| {
        plain(line, Command::GetHostName)
    }),
    known("guest-get-timezone", |line| {
        plain(line, Command::GetTimeZone)
    }),
    known("guest-get-fsinfo", |line| {
        plain(line, Command::GetFileSystems)
    }),
    known("guest-get-vcpus", |line| plain(line, Command::GetVcpus)),
    known("guest-set-vcpus", |line| {
        take(line, |it: only::Vcpus| Command::SetVcpus(it.vcpus))
    }),
    known("guest-ssh-get-authorized-keys", |line| {
        take(line, |it: only::User| Command::GetKeys(it.username))
    }),
    known("guest-ssh-add-authorized-keys", |line| {
        take(line, Command::AddKeys)
    }),
    known("guest-ssh-remove-authorized-keys", |line| {
        take(line, |keys: Keys| Command::RemoveKeys(keys))
    }),
    known("guest-set-user-password", |line| {
        take(line, Command::SetPassword)
    }),
];

/// What every request has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Head<'a> {
    #[serde(borrow)]
    execute: std::borrow::Cow<'a, str>,
    #[serde(default, rename = "arguments")]
    _arguments: IgnoredAny,
    #[serde(default)]
    id: Option<Id>,
}

/// What a request may be known by.
#[derive(Deserialize)]
#[serde(untagged)]
enum Id {
    Number(i64),
    Text(String),
}

#[derive(Deserialize)]
struct Body<T> {
    arguments: Option<T>,
}

/// Reads a line. If that fails, the fault is with the id that the line has, if that much is known.
pub(super) fn read(line: &[u8]) -> Result<Request, (Fault, Option<Value>)> {
    let wrong = |error| (invalid("request", &error), None::<Value>);
    let head: Head<'_> = serde_json::from_slice(line).map_err(wrong)?;
    let id = match head.id {
        Some(Id::Text(text)) if text.len() > QUOTED => {
            return Err((
                Fault::new(format!("an id has at most {QUOTED} bytes")),
                None,
            ));
        }
        Some(Id::Text(text)) => Some(Value::from(text)),
        Some(Id::Number(number)) => Some(Value::from(number)),
        None => None,
    };
    let Some(known) = COMMANDS.iter().find(|known| known.name == head.execute) else {
        let name: String = head.execute.chars().take(QUOTED).collect();
        let fault = Fault::not_found(format!("The command {name} has not been found"));
        return Err((fault, id));
    };
    match (known.read)(line) {
        Ok(asked) => Ok(Request {
            name: known.name,
            asked,
            id,
        }),
        Err(fault) => Err((fault, id)),
    }
}

fn invalid(what: &str, error: &serde_json::Error) -> Fault {
    // It may quote what is wrong, however long that is.
    let text: String = error.to_string().chars().take(4 * QUOTED).collect();
    Fault::new(format!("invalid {what}: {text}"))
}

fn arguments<T: DeserializeOwned>(line: &[u8]) -> Result<T, Fault> {
    let wrong = |error| invalid("arguments", &error);
    let Body { arguments } = serde_json::from_slice(line).map_err(wrong)?;
    match arguments {
        Some(arguments) => Ok(arguments),
        None => serde_json::from_str("{}").map_err(wrong),
    }
}

fn take<T: DeserializeOwned>(line: &[u8], command: fn(T) -> Command) -> Result<Asked, Fault> {
    arguments(line).map(command).map(Asked::Guest)
}

fn plain(line: &[u8], command: Command) -> Result<Asked, Fault> {
    nothing(line, Asked::Guest(command))
}

fn nothing(line: &[u8], asked: Asked) -> Result<Asked, Fault> {
    arguments(line).map(|_: only::Nothing| asked)
}

fn sync(line: &[u8], is_delimited: bool) -> Result<Asked, Fault> {
    let only::Id { id } = arguments(line)?;
    Ok(Asked::Sync { id, is_delimited })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::command::{Capture, Exec, FileSeek, Password, ShutdownMode, Whence};
    use super::*;

    fn asked(line: &str) -> Asked {
        read(line.as_bytes()).map_err(|it| it.0).unwrap().asked
    }

    fn guest(line: &str) -> Command {
        match asked(line) {
            Asked::Guest(command) => command,
            asked => panic!("{asked:?}"),
        }
    }

    fn fault(line: &str) -> Fault {
        read(line.as_bytes()).unwrap_err().0
    }

    #[test]
    fn commands_are_read_with_their_defaults() {
        let line = r#"{"execute": "guest-sync-delimited", "arguments": {"id": -5}}"#;
        let sync = Asked::Sync {
            id: -5,
            is_delimited: true,
        };
        assert_eq!(asked(line), sync);
        let shutdown = r#"{"execute": "guest-shutdown"}"#;
        assert_eq!(guest(shutdown), Command::Shutdown(ShutdownMode::PowerDown));
        let exec = r#"{"arguments": {"path": "/bin/true"}, "execute": "guest-exec"}"#;
        assert_eq!(
            guest(exec),
            Command::Exec(Exec {
                path: "/bin/true".to_owned(),
                arg: Vec::new(),
                env: Vec::new(),
                input_data: Vec::new(),
                capture_output: Capture::None,
            })
        );
        for (said, meant) in [
            ("true", Capture::Separated),
            ("false", Capture::None),
            ("\"merged\"", Capture::Merged),
            ("\"stderr\"", Capture::Stderr),
        ] {
            let line = format!(
                r#"{{"execute": "guest-exec",
                     "arguments": {{"path": "a", "capture-output": {said}}}}}"#
            );
            let Command::Exec(exec) = guest(&line) else {
                panic!("{line}");
            };
            assert_eq!(exec.capture_output, meant, "{said}");
        }
        for (said, whence) in [("2", Whence::End), ("\"cur\"", Whence::Current)] {
            let line = format!(
                r#"{{"execute": "guest-file-seek",
                     "arguments": {{"handle": 1, "offset": 2, "whence": {said}}}}}"#
            );
            let (handle, offset) = (1, 2);
            let seek = FileSeek {
                handle,
                offset,
                whence,
            };
            assert_eq!(guest(&line), Command::FileSeek(seek));
        }
    }

    #[test]
    fn what_is_wrong_is_said_in_the_protocols_form() {
        for (line, class, said) in [
            ("[", "GenericError", "invalid request"),
            ("{}", "GenericError", "execute"),
            (
                r#"{"execute": "guest-nap"}"#,
                "CommandNotFound",
                "The command guest-nap has not been found",
            ),
            (
                r#"{"execute": "guest-ping", "arguments": {"a": 1}}"#,
                "GenericError",
                "unknown field `a`",
            ),
            (r#"{"execute": "guest-exec"}"#, "GenericError", "path"),
            (
                r#"{"execute": "guest-exec", "arguments": {"path": "a\u0000b"}}"#,
                "GenericError",
                "zero byte",
            ),
            (
                r#"{"execute": "guest-exec", "arguments": {"path": "a", "input-data": "%"}}"#,
                "GenericError",
                "invalid arguments",
            ),
            (
                r#"{"execute": "guest-file-seek",
                    "arguments": {"handle": 1, "offset": 0, "whence": 3}}"#,
                "GenericError",
                "whence",
            ),
        ] {
            let fault = fault(line);
            assert_eq!(fault.class, class, "{line}");
            assert!(fault.desc.contains(said), "{line}: {fault}");
        }
    }

    #[test]
    fn an_id_comes_back_with_the_fault_too() {
        let (_, id) = read(br#"{"execute": "guest-nap", "id": "x"}"#).unwrap_err();
        assert_eq!(id, Some(Value::from("x")));
        let request = read(br#"{"execute": "guest-ping", "id": 7}"#).unwrap();
        assert_eq!(request.id, Some(Value::from(7)));
        let long = format!(
            r#"{{"execute": "guest-ping", "id": "{}"}}"#,
            "x".repeat(200)
        );
        assert!(fault(&long).desc.contains("at most 128"));
    }

    #[test]
    fn a_password_is_not_shown() {
        let line = r#"{"execute": "guest-set-user-password",
            "arguments": {"username": "me", "password": "c2VjcmV0", "crypted": false}}"#;
        let command = guest(line);
        let Command::SetPassword(Password { password, .. }) = &command else {
            panic!("{command:?}");
        };
        assert_eq!(password, b"secret");
        let shown = format!("{command:?}");
        assert!(
            !shown.contains("secret") && !shown.contains("115"),
            "{shown}"
        );
    }

    proptest! {
        #[test]
        fn any_arguments_are_a_command_or_a_fault(
            at in 0..COMMANDS.len(),
            key in "id|path|handle|count|vcpus|keys|username|mode|[a-z]{1,4}",
            value in "[0-9]{1,20}|\"[a-z=]{0,8}\"|\\[[0-9,]{0,5}\\]|true|null|\\{\\}",
        ) {
            let name = COMMANDS[at].name;
            let line = format!(r#"{{"execute": "{name}", "arguments": {{"{key}": {value}}}}}"#);
            if let Ok(request) = read(line.as_bytes()) {
                prop_assert_eq!(request.name, name);
            }
        }

        #[test]
        fn any_bytes_are_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            let _ = read(&bytes);
        }
    }
}
