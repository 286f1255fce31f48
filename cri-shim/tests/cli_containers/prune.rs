//! Containers and images that are pruned.

use super::*;

#[test]
fn pruning_takes_containers_that_ended_before_then_and_goes_on_after_one_that_it_cannot() {
    let root = Root::default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let old = ended(&root, "old", 1, 1000);
    let new = ended(&root, "new", 2, now.as_secs());
    root.output(&["prune", "-f", "--keep-size", "1G"])
        .printed("Total reclaimed space: 0B\n");
    assert!(old.exists() && new.exists());
    let bad = container(&root, "bad", 3);
    // It is not possible to connect to a socket there.
    fs::create_dir(bad.join("x")).unwrap();
    symlink("control.sock", bad.join("control.sock")).unwrap();
    // Before the host was booted, which is when `bad` has ended at the latest.
    let until = "until=2020-01-01T00:00:00Z";
    let filter = ["prune", "-f", "--filter", until, "--json"];
    let ran = root.output(&filter);
    ran.refused(1, &["cannot remove bad"]);
    let pruned: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&pruned["containers"], &pruned["pods"], &pruned["deleted"]),
        (&json!(["old"]), &json!([]), &json!([]))
    );
    assert!(!old.exists() && new.exists());
    fs::remove_file(bad.join("control.sock")).unwrap();
    // The images cannot be read at all: the containers are gone all the same.
    let old = ended(&root, "old", 1, 1000);
    let store = root.path().join("images/store.redb");
    fs::create_dir(&store).unwrap();
    let ran = root.output(&filter);
    ran.refused(1, &["store.redb"]);
    let pruned: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(pruned["containers"], json!(["old"]));
    assert!(!old.exists());
    fs::remove_dir(&store).unwrap();
    root.output(&["prune", "-f"])
        .printed("Removed containers: 2\nTotal reclaimed space: 0B\n");
    assert!(!new.exists());
}

#[test]
fn a_record_that_is_not_understood_is_told_of_and_stays() {
    let root = Root::default();
    let dir = container(&root, "tomorrow", 1);
    fs::write(dir.join("container.json"), r#"{"of": "another version"}"#).unwrap();
    let notes = root.path().join("c/my-notes");
    fs::create_dir(&notes).unwrap();
    for command in [["ps", "-a"].as_slice(), &["prune", "-f"]] {
        let ran = root.output(command);
        ran.refused(0, &["not understood", &dir.display().to_string()]);
        assert!(dir.join("container.json").exists() && notes.exists());
    }
}

#[test]
fn pruning_images_leaves_containers() {
    let root = Root::default();
    let dir = ended(&root, "old", 1, 1000);
    root.output(&["image", "prune", "-f"])
        .printed("Total reclaimed space: 0B\n");
    let ran = root.output(&["image", "prune", "-f", "--json"]);
    let pruned: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&pruned["deleted"], &pruned["containers"]),
        (&json!([]), &Value::Null)
    );
    assert!(dir.exists());
}

#[test]
fn pruning_goes_by_when_a_machine_ended_and_not_by_when_it_was_made() {
    let root = Root::default();
    let died = container(&root, "died", 1);
    let record = json!({"exit": "Died", "containers": []}).to_string();
    fs::write(died.join("exit.json"), record).unwrap();
    // At the latest when its host was rebooted.
    let unknown = container(&root, "unknown", 2);
    let pod = container(&root, "pod", 3);
    let record = fs::read_to_string(pod.join("container.json")).unwrap();
    let mut record: Value = serde_json::from_str(&record).unwrap();
    record["isPod"] = json!(true);
    fs::write(pod.join("container.json"), record.to_string()).unwrap();
    let record = json!({"exit": "PoweredOff", "containers": []}).to_string();
    fs::write(pod.join("exit.json"), record).unwrap();
    let filter = ["prune", "-f", "--filter", "until=2020-01-01T00:00:00Z"];
    root.output(&filter).printed("Total reclaimed space: 0B\n");
    let old = SystemTime::now() - std::time::Duration::from_secs(48 * 3600);
    for dir in [&died, &pod] {
        let record = fs::File::options().write(true).open(dir.join("exit.json"));
        record.unwrap().set_modified(old).unwrap();
    }
    root.output(&["prune", "-f", "--filter", "until=24h", "--json"]);
    assert!(!died.exists() && !pod.exists());
    root.output(&["prune", "-f"]);
    assert!(!unknown.exists());
}
