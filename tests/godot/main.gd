# Points on a plane that are to reach their targets, for the tests of cleanrl/ppo_continuous_action_godot.py. Speaks the
# protocol of Godot RL Agents: messages of JSON over TCP, each after its length in 4 bytes, as get_string reads them.
#
# Arguments of Godot RL Agents: --port=, --env_seed=, --speedup=. Of this task:
#   --actions=continuous   "move", a velocity; discrete: "move", one of five; mixed: "gear" (stop, slow, fast) and "move"
#   --agents=10            points
#   --time_limit=1         says of an episode that ran out of time that it was truncated, and where it was then
#   --trouble=             hang, die, or garbage, at the step --trouble_at=, to see what the other side makes of it
extends Node

const STEPS = 40
const SPEED = 0.1
const DIRECTIONS = [Vector2(0, 0), Vector2(1, 0), Vector2(-1, 0), Vector2(0, 1), Vector2(0, -1)]

var arguments = {"port": "11008", "env_seed": "0", "speedup": "1", "actions": "continuous", "agents": "10",
	"time_limit": "0", "trouble": "", "trouble_at": "0"}
var stream = StreamPeerTCP.new()
var positions = []
var targets = []
var ages = []
var steps = 0
var resetting = false


func _ready():
	for argument in OS.get_cmdline_args():
		var parts = argument.lstrip("-").split("=")
		if parts.size() == 2:
			arguments[parts[0]] = parts[1]
	Engine.iterations_per_second = 60 * int(arguments["speedup"])
	Engine.time_scale = float(arguments["speedup"])
	seed(int(arguments["env_seed"]))
	for i in int(arguments["agents"]):
		positions.append(Vector2())
		targets.append(Vector2())
		ages.append(0)
		restart(i)
	stream.connect_to_host("127.0.0.1", int(arguments["port"]))
	while stream.get_status() == StreamPeerTCP.STATUS_CONNECTING:
		OS.delay_msec(1)
	stream.set_no_delay(true)


func restart(i):
	positions[i] = Vector2(rand_range(-1, 1), rand_range(-1, 1))
	targets[i] = Vector2(rand_range(-1, 1), rand_range(-1, 1))
	ages[i] = 0


# One message in, one out, per tick of the physics
func _physics_process(_delta):
	var message = receive()
	if message == null or message["type"] == "close":
		get_tree().quit()
	elif message["type"] == "env_info":
		send({"type": "env_info", "n_agents": len(positions), "action_space": action_space(),
			"observation_space": {"obs": {"size": [2], "space": "box"}}})
	elif message["type"] == "reset":
		for i in len(positions):
			restart(i)
		send({"type": "reset", "obs": observations()})
	elif message["type"] == "action":
		send(step(message["action"]))


func action_space():
	var space = {}
	if arguments["actions"] == "mixed":
		space["gear"] = {"size": 3, "action_type": "discrete"}
	if arguments["actions"] == "discrete":
		space["move"] = {"size": len(DIRECTIONS), "action_type": "discrete"}
	else:
		space["move"] = {"size": 2, "action_type": "continuous"}
	return space


func observation(i):
	return {"obs": [targets[i].x - positions[i].x, targets[i].y - positions[i].y]}


func observations():
	var all = []
	for i in len(positions):
		all.append(observation(i))
	return all


func velocity(action):
	if arguments["actions"] == "discrete":
		return DIRECTIONS[int(action["move"])]
	var move = Vector2(clamp(action["move"][0], -1, 1), clamp(action["move"][1], -1, 1))
	return move * [0, 0.5, 1][int(action["gear"])] if arguments["actions"] == "mixed" else move


func step(actions):
	steps += 1
	if arguments["trouble"] != "" and steps == int(arguments["trouble_at"]):
		make_trouble()
	var reply = {"type": "step", "reward": [], "done": [], "info": []}
	for i in len(positions):
		var before = positions[i].distance_to(targets[i])
		positions[i] += SPEED * velocity(actions[i])
		ages[i] += 1
		var after = positions[i].distance_to(targets[i])
		var there = after < SPEED
		var late = ages[i] == STEPS and not there
		var info = {}
		if late and arguments["time_limit"] == "1":
			info = {"TimeLimit.truncated": true, "terminal_observation": observation(i)}
		reply["reward"].append(before - after + (1.0 if there else 0.0))
		reply["done"].append(there or late)
		reply["info"].append(info)
		if there or late:
			restart(i)
	reply["obs"] = observations()
	return reply


func make_trouble():
	if arguments["trouble"] == "hang":
		OS.delay_msec(600 * 1000)
	elif arguments["trouble"] == "garbage":
		stream.put_string("no JSON")
	else:
		OS.kill(OS.get_process_id())


func receive():
	var looks = 0
	while stream.get_available_bytes() == 0:
		if stream.get_status() != StreamPeerTCP.STATUS_CONNECTED:
			return null
		looks += 1
		OS.delay_usec(20 if looks < 50 else 1000)  # an update takes long, and may need this core
	return JSON.parse(stream.get_string()).result


func send(dictionary):
	stream.put_string(JSON.print(dictionary))
