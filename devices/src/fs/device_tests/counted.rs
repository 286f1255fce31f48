use super::*;

#[test]
fn errors_count_unless_programs_meet_them_all_the_time_and_each_request_has_a_latency() {
    let mut rig = rig();
    std::fs::write(rig.dir.path().join("file"), "text").unwrap();
    std::fs::create_dir(rig.dir.path().join("dir")).unwrap();
    rig.begin();
    let node = rig.look_up(b"file\0").nodeid;
    let mut error = |opcode, body: &[u8]| {
        let reply = rig.call(opcode, ROOT, body);
        (reply.error, rig.counter("errors"))
    };
    assert_eq!(error(Opcode::Rmdir, b"dir\0"), (0, 0));
    assert_eq!(error(Opcode::Unlink, b"none\0"), (libc::ENOENT, 0));
    let link = [&node.to_le_bytes()[..], b"file\0"].concat();
    assert_eq!(error(Opcode::Link, &link), (libc::EEXIST, 0));
    let attribute = [&64u32.to_le_bytes()[..], &[0; 4], b"user.none\0"].concat();
    assert_eq!(error(Opcode::Getxattr, &attribute), (libc::ENODATA, 0));
    assert_eq!(error(Opcode::SetupMapping, &[]), (libc::ENOSYS, 0));
    assert_eq!(error(Opcode::Rmdir, b"file\0"), (libc::ENOTDIR, 1));
    assert_eq!(error(Opcode::Unlink, b"no end"), (libc::EINVAL, 2));
    // A reply whose error lies in two buffers.
    let bytes = message(Opcode::Rmdir, ROOT, b"file\0");
    rig.mem.write_slice(&bytes, GuestAddress(IN)).unwrap();
    let len = u32::try_from(bytes.len()).unwrap();
    rig.requests
        .add(&[(IN, len)], &[(OUT, 5), (OUT + 0x1000, 100)]);
    rig.notify(1);
    assert_eq!(rig.requests.take_used().unwrap().len, 16);
    assert_eq!(rig.counter("errors"), 3);
    let counters = rig.device.info().counters.read();
    let latencies = counters
        .iter()
        .skip_while(|counter| counter.name != "under_16us");
    let counted: Vec<_> = latencies.map(|counter| counter.value).collect();
    assert_eq!(counted.len(), 8);
    assert_eq!(counted.iter().sum::<u64>(), rig.counter("requests"));
}
