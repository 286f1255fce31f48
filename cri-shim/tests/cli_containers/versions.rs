//! Containers of another version of podvisor.

use super::*;

/// Answers on a control socket that it speaks another version of the protocol.
fn other_version(dir: &Path) {
    let listener = std::os::unix::net::UnixListener::bind(dir.join("control.sock")).unwrap();
    let answer = |mut stream: UnixStream| -> std::io::Result<()> {
        let mut length = [0; 4];
        stream.read_exact(&mut length)?;
        let mut request = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut request)?;
        let request: Value = serde_json::from_slice(&request).unwrap();
        let hello = json!({"Hello": {"version": 99_999, "missing_layers": []}});
        let reply = json!({"number": request["number"], "answer": {"Ok": hello}});
        let reply = serde_json::to_vec(&reply).unwrap();
        let length = u32::try_from(reply.len()).unwrap();
        stream.write_all(&length.to_le_bytes())?;
        stream.write_all(&reply)
    };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // A client that disconnects early does not need the answer.
            let _ = answer(stream.unwrap());
        }
    });
}

#[test]
fn a_container_of_another_version_is_shown_with_what_to_do() {
    let root = Root::default();
    other_version(&container(&root, "other", 1));
    let ran = root.output(&["ps", "--json"]);
    ran.refused(0, &["container other", "podvisor rm -f", "version 99999"]);
    let ps: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&ps[0]["State"], &ps[0]["Names"]),
        (&json!("unknown"), &json!(["other"]))
    );
    root.output(&["stop", "other"])
        .refused(1, &["container other", "podvisor rm -f"]);
}

#[test]
fn a_pod_of_another_version_does_not_hide_the_others() {
    let root = Root::default();
    for (name, number) in [("other", 1), ("old", 2)] {
        let dir = container(&root, name, number);
        rewrite(&dir, &[("isPod", json!(true))]);
    }
    other_version(&root.path().join("c").join("01".repeat(6)));
    let ran = root.output(&["pod", "ls", "--json"]);
    ran.refused(0, &["pod other", "podvisor pod rm -f"]);
    let pods: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let mut states: Vec<_> = pods
        .iter()
        .map(|pod| (&pod["Name"], &pod["State"]))
        .collect();
    states.sort_by_key(|(name, _)| name.to_string());
    assert_eq!(
        states,
        [
            (&json!("old"), &json!("Exited")),
            (&json!("other"), &json!("Unknown"))
        ]
    );
}
