package penstock

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// Options of a worker. FromEnvironment has the variable of each.
type Options struct {
	// Names or URLs of the queue to receive from and the one to answer in.
	OutboundQueue, ResultsQueue string
	// Region of AWS, and the address of an SQS other than AWS.
	Region, Endpoint string
	// Name that status shows for each attempt: 1 to 100 printable ASCII characters.
	Name string
	// Concurrency is how many tasks run at once.
	Concurrency int
	// Visibility, in whole seconds, is how long a message of a dead worker waits.
	Visibility time.Duration
	Heartbeat  time.Duration
	// Grace is how long Run finishes tasks after SIGTERM.
	Grace time.Duration
	// TaskTimeout is the time limit of an attempt whose task and action have none.
	TaskTimeout time.Duration
	// ResultLimit is in bytes of JSON, as PENSTOCK_RESULT_LIMIT_BYTES of the pipeline.
	ResultLimit int
	// StepsLimit is in bytes of JSON, for the journal of a task, as PENSTOCK_STEPS_LIMIT_BYTES of the pipeline.
	StepsLimit int
	// StepsMost is how many durable steps a task may have, as PENSTOCK_STEPS_LIMIT of the pipeline.
	StepsMost int
	// PayloadKeys decrypt payloads: base64, as of `penstock payload-key`.
	PayloadKeys []string
	// Log gets each event; one line of JSON on stderr by default.
	Log func(level, event string, fields map[string]any)
}

// OptionsFromEnvironment reads the PENSTOCK_* and AWS_* variables that Penstock's own workers read.
func OptionsFromEnvironment() (Options, error) {
	read := reader{}
	options := Options{
		OutboundQueue: os.Getenv("PENSTOCK_OUTBOUND_QUEUE"),
		ResultsQueue:  os.Getenv("PENSTOCK_RESULTS_QUEUE"),
		Region:        first("PENSTOCK_AWS_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"),
		Endpoint:      first("PENSTOCK_SQS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS", "AWS_ENDPOINT_URL"),
		Name:          os.Getenv("PENSTOCK_WORKER_NAME"),
		Concurrency:   int(read.number("PENSTOCK_WORKER_CONCURRENCY")),
		Visibility:    read.seconds("PENSTOCK_VISIBILITY_TIMEOUT_SECONDS"),
		Heartbeat:     read.seconds("PENSTOCK_HEARTBEAT_SECONDS"),
		Grace:         read.grace(),
		TaskTimeout:   read.seconds("PENSTOCK_TASK_TIMEOUT_SECONDS"),
		ResultLimit:   int(read.number("PENSTOCK_RESULT_LIMIT_BYTES")),
		StepsLimit:    int(read.number("PENSTOCK_STEPS_LIMIT_BYTES")),
		StepsMost:     int(read.number("PENSTOCK_STEPS_LIMIT")),
	}
	for _, key := range strings.Split(os.Getenv("PENSTOCK_PAYLOAD_KEYS"), ",") {
		if key = strings.TrimSpace(key); key != "" {
			options.PayloadKeys = append(options.PayloadKeys, key)
		}
	}
	return options, read.err
}

// FromEnvironment returns a worker by OptionsFromEnvironment.
func FromEnvironment() (*Worker, error) {
	options, err := OptionsFromEnvironment()
	if err != nil {
		return nil, err
	}
	return New(options)
}

// New returns a worker without actions. Options that are zero have the defaults of Penstock's own worker.
func New(options Options) (*Worker, error) {
	for name, queue := range map[string]string{"OUTBOUND": options.OutboundQueue, "RESULTS": options.ResultsQueue} {
		if queue == "" {
			return nil, fmt.Errorf("PENSTOCK_%s_QUEUE is empty: set it to the name or URL of a queue", name)
		}
	}
	if options.Region == "" {
		return nil, fmt.Errorf("there is no region: set PENSTOCK_AWS_REGION or AWS_REGION")
	}
	keys, err := newPayloadKeys(options.PayloadKeys)
	if err != nil {
		return nil, err
	}
	orElse(&options.Endpoint, serviceURL("sqs", options.Region))
	orElse(&options.Name, ownName())
	orElse(&options.Concurrency, 100)
	orElse(&options.Visibility, 60*time.Second)
	orElse(&options.Heartbeat, 20*time.Second)
	orElse(&options.Grace, 25*time.Second)
	orElse(&options.TaskTimeout, 900*time.Second)
	orElse(&options.ResultLimit, 256*1024)
	orElse(&options.StepsLimit, 256*1024)
	orElse(&options.StepsMost, 1000)
	if options.Concurrency < 0 || options.Visibility < time.Second || options.Heartbeat < 0 || options.Grace < 0 {
		return nil, fmt.Errorf(
			"concurrency %d, visibility %s, heartbeat %s, grace %s: none may be negative, and visibility is at least 1 s",
			options.Concurrency, options.Visibility, options.Heartbeat, options.Grace)
	}
	if options.Log == nil {
		options.Log = logToStderr
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 16
	queues := &queueClient{
		endpoint: options.Endpoint, region: options.Region, http: &http.Client{Transport: transport},
		provider: &provider{getenv: os.Getenv, region: options.Region},
	}
	return &Worker{
		options: options, queues: queues, keys: keys, actions: map[string]action{}, attempts: map[*Task]bool{},
		freed: make(chan struct{}, 1), slots: make(chan struct{}, options.Concurrency),
		sender: &sender{
			queues: queues, worker: options.Name, log: options.Log, wake: make(chan struct{}, 1),
			runTimes: map[string][2]float64{},
		},
		leases: &leases{
			queues: queues, seconds: int(options.Visibility / time.Second), log: options.Log,
			all: map[*lease]bool{}, wake: make(chan struct{}, 1),
		},
	}, nil
}

func orElse[T comparable](value *T, other T) {
	var zero T
	if *value == zero {
		*value = other
	}
}

func ownName() string {
	host, _ := os.Hostname() // a worker may have no name
	host = strings.Map(func(char rune) rune {
		if char < '!' || char > '~' {
			return -1
		}
		return char
	}, host)
	orElse(&host, "localhost")
	return fmt.Sprintf("%s:%d", cut(host, 80), os.Getpid())
}

func first(names ...string) string {
	for _, name := range names {
		if value := os.Getenv(name); value != "" {
			return value
		}
	}
	return ""
}

// reader reads numbers and keeps the first error.
type reader struct{ err error }

func (r *reader) number(name string) float64 {
	text := os.Getenv(name)
	if text == "" {
		return 0
	}
	value, err := strconv.ParseFloat(text, 64)
	if (err != nil || !(value > 0)) && r.err == nil {
		r.err = fmt.Errorf("%s is %q: set it to a number above 0", name, text)
	}
	return value
}

func (r *reader) seconds(name string) time.Duration {
	return secondsOf(r.number(name))
}

// grace may be 0, as for Penstock's own worker; as an option 0 stands for the default.
func (r *reader) grace() time.Duration {
	const name = "PENSTOCK_GRACE_SECONDS"
	if value, err := strconv.ParseFloat(os.Getenv(name), 64); err == nil && value == 0 {
		return time.Nanosecond
	}
	return r.seconds(name)
}

func logToStderr(level, event string, fields map[string]any) {
	line := map[string]any{"timestamp": time.Now().UTC().Format(time.RFC3339Nano), "level": level, "event": event}
	for name, value := range fields {
		line[name] = value
	}
	if text, err := json.Marshal(line); err == nil {
		os.Stderr.Write(append(text, '\n'))
	}
}
