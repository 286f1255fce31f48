use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, DuplexStream, duplex};

use super::*;
use crate::{FileUse, GuestUser, Program, ProgramExit, ShutdownMode};

const LIMIT: Duration = Duration::from_secs(5);

/// A guest's agent, of which each test decides what it answers.
struct Guest(BufReader<DuplexStream>);

fn pair() -> (GuestAgent<DuplexStream>, Guest) {
    let (ours, theirs) = duplex(1 << 16);
    (GuestAgent::new(ours), Guest(BufReader::new(theirs)))
}

impl Guest {
    async fn say(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// Reads the next request, which is `command`; returns its arguments.
    async fn asked(&mut self, command: &str) -> Value {
        let mut line = Vec::new();
        self.0.read_until(b'\n', &mut line).await.unwrap();
        let line = line.strip_prefix(&[0xff]).unwrap_or(&line);
        let mut request: Value = serde_json::from_slice(line).unwrap();
        assert_eq!(request["execute"], command);
        request["arguments"].take()
    }

    async fn sync(&mut self) {
        let number = self.asked("guest-sync-delimited").await["id"].take();
        self.say(b"\xff").await;
        self.answer(number).await;
    }

    async fn answer(&mut self, value: Value) {
        let line = json!({ "return": value });
        self.say(format!("{line}\n").as_bytes()).await;
    }

    async fn refuse(&mut self, class: &str, why: &str) {
        let line = json!({ "error": { "class": class, "desc": why } });
        self.say(format!("{line}\n").as_bytes()).await;
    }
}

#[tokio::test]
async fn commands_after_the_first_need_no_other_step() {
    let (agent, mut guest) = pair();
    let plays = async {
        guest.sync().await;
        guest.asked("guest-ping").await;
        guest.answer(json!({})).await;
        guest.asked("guest-fsfreeze-freeze").await;
        guest.answer(json!(3)).await;
        guest.asked("guest-fsfreeze-thaw").await;
        guest.refuse("GenericError", "not frozen\u{1b}").await;
    };
    let asks = async {
        agent.ping(LIMIT).await.unwrap();
        assert_eq!(agent.freeze(LIMIT).await.unwrap(), 3);
        let error = agent.thaw(LIMIT).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the guest's agent refused guest-fsfreeze-thaw: not frozen "
        );
    };
    tokio::join!(plays, asks);
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_is_not_taken_for_that_to_the_next_command() {
    let (agent, mut guest) = pair();
    let plays = async {
        guest.sync().await;
        guest.asked("guest-fsfreeze-freeze").await;
        tokio::time::sleep(2 * LIMIT).await;
        guest.answer(json!(7)).await;
        // Of a command that was cut off, and of another sync.
        guest.say(b"{\"return\": \xff\xff{\"return\": 99}\n").await;
        guest.sync().await;
        guest.asked("guest-fsfreeze-thaw").await;
        guest.answer(json!(1)).await;
    };
    let asks = async {
        let error = agent.freeze(LIMIT).await.unwrap_err();
        assert!(error.is_no_agent(), "{error}");
        assert!(error.to_string().contains("within 5000 ms"), "{error}");
        assert_eq!(agent.thaw(4 * LIMIT).await.unwrap(), 1);
    };
    tokio::join!(plays, asks);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_command_leaves_the_others_in_step() {
    let (agent, mut guest) = pair();
    let plays = async {
        guest.sync().await;
        guest.asked("guest-fsfreeze-freeze").await;
        tokio::time::sleep(LIMIT).await;
        guest.answer(json!(7)).await;
        guest.sync().await;
        guest.asked("guest-ping").await;
        guest.answer(json!({})).await;
    };
    let asks = async {
        let cancelled = timeout(LIMIT / 2, agent.freeze(2 * LIMIT)).await;
        assert!(cancelled.is_err());
        agent.ping(4 * LIMIT).await.unwrap();
    };
    tokio::join!(plays, asks);
}

#[tokio::test(start_paused = true)]
async fn nobody_and_a_closed_port_are_no_agent() {
    let (agent, guest) = pair();
    assert!(agent.ping(LIMIT).await.unwrap_err().is_no_agent());
    drop(guest);
    let error = agent.ping(LIMIT).await.unwrap_err();
    assert!(matches!(error, GuestAgentError::Port { .. }), "{error}");
}

#[tokio::test]
async fn hostile_answers_are_errors_that_name_the_command() {
    for (answer, said) in [
        (&b"{\"return\": {}}\n"[..], "something else"),
        (b"{\"return\": -1}\n", "something else"),
        (b"{}\n", "something else"),
        (b"[[[[\n", "something else"),
        (b"no json \xc3\n", "something else"),
        (b"{\"error\": 5}\n", "something else"),
        (
            b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"off\"}}\n",
            "does not allow",
        ),
    ] {
        let (agent, mut guest) = pair();
        let plays = async {
            guest.sync().await;
            guest.asked("guest-fsfreeze-freeze").await;
            guest.say(answer).await;
        };
        let (error, ()) = tokio::join!(agent.freeze(LIMIT), plays);
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains(said) && error.contains("guest-fsfreeze-freeze"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_answer_without_end_is_an_error_and_deep_nesting_no_stack_overflow() {
    for byte in [b'x', b'['] {
        let (agent, mut guest) = pair();
        let plays = async {
            guest.sync().await;
            guest.asked("guest-fsfreeze-freeze").await;
            let piece = vec![byte; 1 << 16];
            for _ in 0..=MAX_ANSWER / piece.len() {
                guest.say(&piece).await;
            }
            guest.say(b"\n").await;
        };
        let (error, ()) = tokio::join!(agent.freeze(LIMIT * 20), plays);
        let error = error.unwrap_err();
        assert!(matches!(error, GuestAgentError::TooLong { .. }), "{error}");
    }
    let deep = format!("{{\"return\": {}\n", "[".repeat(1 << 20));
    assert!(read::<u64>("guest-ping", deep.as_bytes()).is_err());
}

#[tokio::test]
async fn cpus_that_are_offline_are_brought_online() {
    let (agent, mut guest) = pair();
    let plays = async {
        let cpu = |id: u32, online| json!({ "logical-id": id, "online": online });
        guest.sync().await;
        guest.asked("guest-get-vcpus").await;
        guest
            .answer(json!([cpu(0, true), cpu(2, false), cpu(5, false)]))
            .await;
        let set = guest.asked("guest-set-vcpus").await;
        assert_eq!(set["vcpus"], json!([cpu(2, true), cpu(5, true)]));
        // One more than there are: such an answer counts as all.
        guest.answer(json!(3)).await;
        guest.asked("guest-get-vcpus").await;
        guest.answer(json!([cpu(0, true), cpu(2, true)])).await;
    };
    let (online, ()) = tokio::join!(
        async {
            let first = agent.use_cpus(3, LIMIT).await.unwrap();
            (first, agent.use_cpus(3, LIMIT).await.unwrap())
        },
        plays
    );
    assert_eq!(online, (true, false));
}

#[tokio::test]
async fn a_guest_says_what_it_can_of_itself() {
    let (agent, mut guest) = pair();
    let plays = async {
        guest.sync().await;
        guest.asked("guest-info").await;
        let commands = json!([
            { "name": "guest-exec", "enabled": true, "success-response": true },
            { "name": "guest-file-open", "enabled": false },
        ]);
        guest
            .answer(json!({ "version": "7.2.0", "supported_commands": commands }))
            .await;
        guest.asked("guest-fsfreeze-status").await;
        guest.answer(json!("thawed")).await;
        guest.asked("guest-get-osinfo").await;
        guest
            .answer(json!({ "id": "debian", "pretty-name": "Debian 12", "new": [1] }))
            .await;
        guest.asked("guest-get-host-name").await;
        guest.answer(json!({ "host-name": "vm1" })).await;
        guest.asked("guest-get-timezone").await;
        guest.refuse("CommandNotFound", "disabled").await;
        guest.asked("guest-get-users").await;
        guest
            .answer(json!([{ "user": "me", "login-time": 1.5 }]))
            .await;
        guest.asked("guest-network-get-interfaces").await;
        let address = json!({ "ip-address": "10.0.0.2", "ip-address-type": "ipv4", "prefix": 24 });
        let card = json!({ "name": "eth0", "ip-addresses": [address] });
        guest.answer(json!([card, { "name": "lo" }])).await;
        guest.asked("guest-get-fsinfo").await;
        guest
            .answer(json!([{ "name": "vda1", "mountpoint": "/", "type": "ext4", "disk": [] }]))
            .await;
    };
    let (info, ()) = tokio::join!(agent.info(LIMIT), plays);
    let info = info.unwrap();
    assert_eq!(info.agent_version, "7.2.0");
    assert_eq!(info.commands, ["guest-exec"]);
    assert_eq!(
        (info.os.id.as_str(), info.host_name.as_str()),
        ("debian", "vm1")
    );
    assert_eq!(info.time_zone, "");
    let user = GuestUser {
        name: "me".to_owned(),
        domain: String::new(),
        login_time: 1.5,
    };
    assert_eq!(info.users, [user]);
    assert_eq!(info.interfaces[0].addresses[0].address, "10.0.0.2");
    assert_eq!(info.file_systems[0].mount_point, "/");
}

#[tokio::test]
async fn a_file_is_read_to_its_end_and_written_whole() {
    let (agent, mut guest) = pair();
    let plays = async {
        guest.sync().await;
        let asked = guest.asked("guest-file-open").await;
        assert_eq!(
            (&asked["path"], &asked["mode"]),
            (&json!("/a"), &json!("rb"))
        );
        guest.answer(json!(7)).await;
        for (data, eof) in [("aGVs", false), ("", false), ("bG8=", true), ("", true)] {
            assert_eq!(guest.asked("guest-file-read").await["handle"], 7);
            guest
                .answer(json!({ "count": 3, "buf-b64": data, "eof": eof }))
                .await;
        }
        // A part of it at first, and more than there is.
        for (said, written) in [("aGVsbG8=", 2), ("bGxv", 3), ("eA==", 2)] {
            assert_eq!(guest.asked("guest-file-write").await["buf-b64"], said);
            guest
                .answer(json!({ "count": written, "eof": false }))
                .await;
        }
        assert_eq!(guest.asked("guest-file-close").await["handle"], 7);
        guest.answer(json!({})).await;
    };
    let asks = async {
        let file = agent.open_file("/a", FileUse::Read, LIMIT).await.unwrap();
        let mut text = Vec::new();
        loop {
            let piece = agent.read_file(file, LIMIT).await.unwrap();
            match piece.is_empty() {
                true => break,
                false => text.extend(piece),
            }
        }
        assert_eq!(text, b"hello");
        agent.write_file(file, b"hello", LIMIT).await.unwrap();
        let error = agent.write_file(file, b"x", LIMIT).await.unwrap_err();
        assert!(error.to_string().contains("2 of 1 bytes"), "{error}");
        agent.close_file(file, LIMIT).await.unwrap();
    };
    tokio::join!(plays, asks);
}

#[tokio::test]
async fn a_file_without_progress_is_an_error() {
    let (agent, mut guest) = pair();
    let plays = async {
        guest.sync().await;
        guest.asked("guest-file-open").await;
        guest.answer(json!(7)).await;
        for _ in 0..16 {
            guest.asked("guest-file-read").await;
            guest.answer(json!({ "count": 0, "buf-b64": "" })).await;
        }
        for _ in 0..17 {
            guest.asked("guest-file-write").await;
            guest.answer(json!({ "count": 1 })).await;
        }
    };
    let asks = async {
        let file = agent.open_file("/a", FileUse::Read, LIMIT).await.unwrap();
        let error = agent.read_file(file, LIMIT).await.unwrap_err();
        assert!(error.to_string().contains("neither bytes"), "{error}");
        let error = agent.write_file(file, &[0; 100], LIMIT).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("1 of 84 bytes"), "{error}");
    };
    tokio::join!(plays, asks);
}

#[tokio::test]
async fn a_program_runs_with_its_input_and_is_waited_for() {
    let (agent, mut guest) = pair();
    let program = Program {
        path: "cat".to_owned(),
        arguments: vec!["-".to_owned()],
        input: b"hello".to_vec(),
        ..Program::default()
    };
    let plays = async {
        guest.sync().await;
        let asked = guest.asked("guest-exec").await;
        assert_eq!(asked["input-data"], "aGVsbG8=");
        assert_eq!(asked["env"], Value::Null);
        guest.answer(json!({ "pid": 42 })).await;
        for _ in 0..3 {
            assert_eq!(guest.asked("guest-exec-status").await["pid"], 42);
            guest.answer(json!({ "exited": false })).await;
        }
        guest.asked("guest-exec-status").await;
        guest
            .answer(json!({ "exited": true, "exitcode": 3, "out-data": "aGVsbG8=" }))
            .await;
        guest.asked("guest-exec-status").await;
        guest
            .answer(json!({ "exited": true, "signal": 9, "err-data": "%" }))
            .await;
    };
    let asks = async {
        let number = agent.start_program(&program, LIMIT).await.unwrap();
        let end = agent.program_end(number, LIMIT).await.unwrap();
        assert_eq!(end.exit, ProgramExit::Code(3));
        assert_eq!(
            (end.stdout.as_slice(), end.stderr.as_slice()),
            (&b"hello"[..], &b""[..])
        );
        let error = agent.program_end(number, LIMIT).await.unwrap_err();
        assert!(error.to_string().contains("not base64"), "{error}");
    };
    tokio::join!(plays, asks);
    let large = Program {
        input: vec![0; (1 << 20) + 1],
        ..program
    };
    let error = agent.start_program(&large, LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("at most 1048576"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_clock_is_set_by_date_where_the_agent_cannot() {
    let (agent, mut guest) = pair();
    let plays = async {
        guest.sync().await;
        guest.asked("guest-set-time").await;
        guest
            .refuse("GenericError", "this feature is not currently supported")
            .await;
        let asked = guest.asked("guest-exec").await;
        assert_eq!(
            (&asked["path"], &asked["arg"]),
            (&json!("date"), &json!(["-s", "@0"]))
        );
        guest.answer(json!({ "pid": 1 })).await;
        guest.asked("guest-exec-status").await;
        guest.answer(json!({ "exited": true, "exitcode": 0 })).await;
    };
    let (set, ()) = tokio::join!(agent.set_time(SystemTime::UNIX_EPOCH, LIMIT), plays);
    set.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_is_done_when_nobody_refuses_it() {
    let (agent, mut guest) = pair();
    let plays = async {
        guest.sync().await;
        assert_eq!(guest.asked("guest-shutdown").await["mode"], "powerdown");
        tokio::time::sleep(LIMIT).await;
        guest.sync().await;
        assert_eq!(guest.asked("guest-shutdown").await["mode"], "reboot");
        guest.refuse("GenericError", "no").await;
        guest.sync().await;
        assert_eq!(guest.asked("guest-set-time").await["time"], 0);
        guest
            .refuse("GenericError", "hwclock failed to set hardware clock")
            .await;
    };
    let asks = async {
        agent
            .shutdown(ShutdownMode::PowerDown, LIMIT)
            .await
            .unwrap();
        let refused = agent.shutdown(ShutdownMode::Reboot, 2 * LIMIT).await;
        assert!(refused.unwrap_err().to_string().contains("refused"));
        agent.set_time(SystemTime::UNIX_EPOCH, LIMIT).await.unwrap();
    };
    tokio::join!(plays, asks);
}
