//! Logs: their format, and rotation.

use std::fs;

use podvisor_cri_messages::*;

use crate::client::ask;
use crate::pod::{Pod, strings};
use crate::support::until;

#[test]
fn guest_both_streams_are_logged_with_time_and_tag() {
    let pod = Pod::shared();
    let container = pod.start("logs", |config| {
        let script = "echo one; echo two >&2; printf 'no end'";
        config.command = strings(&["sh", "-c", script]);
    });
    container.ended();
    let text = fs::read_to_string(container.log()).unwrap();
    for line in text.lines() {
        let fields: Vec<&str> = line.splitn(4, ' ').collect();
        let [time, stream, tag, _] = fields[..] else {
            panic!("{line:?}");
        };
        // RFC 3339 with a fraction and an offset.
        assert!(
            time.len() > 25 && time.as_bytes()[10] == b'T' && time.contains('.'),
            "{time}"
        );
        assert!(stream == "stdout" || stream == "stderr", "{line:?}");
        assert!(tag == "F" || tag == "P", "{line:?}");
    }
    let mut lines = container.lines();
    lines.sort();
    let expected = [("stderr", "two"), ("stdout", "no end"), ("stdout", "one")];
    let expected = expected.map(|(stream, text)| (stream.to_owned(), text.to_owned()));
    assert_eq!(lines, expected);
    container.remove();
}

#[test]
fn guest_a_long_line_is_logged_in_parts_that_join_to_the_whole() {
    let pod = Pod::shared();
    let container = pod.start("long", |config| {
        let script = "head -c 100000 /dev/zero | tr '\\0' x; echo; echo end";
        config.command = strings(&["sh", "-c", script]);
    });
    container.ended();
    let text = fs::read_to_string(container.log()).unwrap();
    let mut joined = String::new();
    let mut parts = 0;
    for line in text.lines() {
        let fields: Vec<&str> = line.splitn(4, ' ').collect();
        joined.push_str(fields[3]);
        if fields[2] == "F" {
            joined.push('\n');
        } else {
            parts += 1;
        }
    }
    assert!(parts > 0);
    assert_eq!(joined, format!("{}\nend\n", "x".repeat(100_000)));
    container.remove();
}

#[test]
fn guest_a_log_that_was_moved_away_is_opened_anew_without_losing_a_line() {
    let pod = Pod::shared();
    let container = pod.start("rotated", |config| {
        let script = "i=0; while [ $i -lt 300 ]; do echo $i; i=$((i+1)); sleep 0.01; done; \
                      until [ -e /rotated ]; do sleep 0.1; done";
        config.command = strings(&["sh", "-c", script]);
    });
    let old = container.log().with_extension("old");
    until("the first line", || {
        fs::read(container.log()).is_ok_and(|log| !log.is_empty())
    });
    fs::rename(container.log(), &old).unwrap();
    ask!(reopen_container_log(ReopenContainerLogRequest {
        container_id: container.id.clone(),
    }))
    .unwrap();
    assert!(container.log().exists());
    container.sh("touch /rotated");
    container.ended();
    let mut numbers = Vec::new();
    for file in [old.as_path(), container.log()] {
        for line in fs::read_to_string(file).unwrap().lines() {
            numbers.push(line.rsplit(' ').next().unwrap().to_owned());
        }
    }
    let expected: Vec<String> = (0..300).map(|n| n.to_string()).collect();
    assert_eq!(numbers, expected);
    let refused = ask!(reopen_container_log(ReopenContainerLogRequest {
        container_id: container.id.clone(),
    }));
    refused.expect_err("the container has ended");
    container.remove();
}
