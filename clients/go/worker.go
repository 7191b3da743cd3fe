// Package penstock is a worker for Penstock, a durable task queue on Postgres and Amazon SQS.
package penstock

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/signal"
	"reflect"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	receiveSeconds = 20
	announceWait   = time.Minute
	lastWait       = 1500 * time.Millisecond // of the grace period, for releasing messages
)

// Worker receives tasks from the outbound queue, runs their handlers and answers in the results queue.
type Worker struct {
	options Options
	queues  *queueClient
	keys    payloadKeys
	actions map[string]action
	sender  *sender
	leases  *leases

	mu       sync.Mutex
	attempts map[*Task]bool
	freed    chan struct{} // an attempt has ended
	slots    chan struct{} // one for each task that runs
	ended    atomic.Bool   // an answer from now on would be one of a task that is given back
}

type action struct {
	run         func(context.Context, json.RawMessage) (any, error)
	timeout     time.Duration
	maxAttempts int
}

// Option is a setting of one action.
type Option func(*action)

// Timeout limits each attempt of an action, unless the task has a limit of its own.
func Timeout(limit time.Duration) Option { return func(a *action) { a.timeout = limit } }

// MaxAttempts lowers the number of attempts of an action's tasks.
func MaxAttempts(number int) Option { return func(a *action) { a.maxAttempts = number } }

// Handle registers the handler of an action, before Run. A payload that is an object is read into T by encoding/json; one
// that is an array, into the exported fields of the struct T in their order.
func Handle[T any](w *Worker, name string, handler func(ctx context.Context, params T) (any, error), options ...Option) {
	if _, ok := w.actions[name]; ok {
		panic("penstock: the action " + name + " has a handler already")
	}
	made := action{run: func(ctx context.Context, text json.RawMessage) (any, error) {
		var params T
		if err := readParams(text, &params); err != nil {
			message := "invalid parameters: " + err.Error()
			return nil, &failure{kind: "BadParams", message: message, code: codeInvalidParams}
		}
		return handler(ctx, params)
	}}
	for _, option := range options {
		option(&made)
	}
	w.actions[name] = made
}

func readParams(text json.RawMessage, params any) error {
	target := reflect.ValueOf(params).Elem()
	if !bytes.HasPrefix(text, []byte("[")) || target.Kind() != reflect.Struct {
		return json.Unmarshal(text, params)
	}
	var values []json.RawMessage
	if err := json.Unmarshal(text, &values); err != nil {
		return err
	}
	var fields []int
	for at := 0; at < target.NumField(); at++ {
		if field := target.Type().Field(at); field.IsExported() && field.Tag.Get("json") != "-" {
			fields = append(fields, at)
		}
	}
	if len(values) > len(fields) {
		return fmt.Errorf("%d values for %d parameters", len(values), len(fields))
	}
	for at, value := range values {
		if err := json.Unmarshal(value, target.Field(fields[at]).Addr().Interface()); err != nil {
			return fmt.Errorf("parameter %d: %w", at+1, err)
		}
	}
	return nil
}

// Task is one attempt of a task, as its handler sees it.
type Task struct {
	ID     string
	Claim  string
	Action string
	// Tenant is "" for a task without one.
	Tenant string
	// Redelivered: the message was received before, and an earlier attempt may have done part of the work.
	Redelivered bool
	// Traceparent is the attempt's own span in W3C form, "" without a trace.
	Traceparent, Tracestate string

	worker  *Worker
	request request
	lease   *lease
	steps   *steps
	seenAt  atomic.Int64 // Unix nanoseconds of the last report
	beating atomic.Bool
}

type taskKey struct{}

// TaskOf returns the task whose handler got this context. It panics with any other context.
func TaskOf(ctx context.Context) *Task {
	return ctx.Value(taskKey{}).(*Task)
}

// Progress reports how far the task is, which is a heartbeat too; it returns once the results queue has the report.
func (t *Task) Progress(ctx context.Context, percent float64, note string) error {
	return t.progress(ctx, map[string]any{"percent": percent, "note": note})
}

func (t *Task) progress(ctx context.Context, params map[string]any) error {
	t.seenAt.Store(time.Now().UnixNano())
	params["id"] = t.request.ID
	text, err := toText(notification("progress", params))
	if err != nil {
		return err
	}
	return t.worker.sender.send(ctx, text)
}

// Run works until SIGTERM or SIGINT, or the end of ctx; then it finishes what runs, gives back the rest and returns nil.
func (w *Worker) Run(ctx context.Context) (err error) {
	receiving, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if w.leases.url, err = w.queues.urlOf(receiving, w.options.OutboundQueue); err != nil {
		return err
	}
	if w.sender.url, err = w.queues.urlOf(receiving, w.options.ResultsQueue); err != nil {
		return err
	}
	working, end := context.WithCancel(context.Background())
	defer end()
	go w.sender.run(working)
	go w.leases.keep(working)
	go w.leases.deleteDone(working)
	go w.every(working, w.options.Heartbeat/4, func() { w.heartbeat(working) })
	w.announce(working)
	go w.every(receiving, announceWait, func() { w.announce(working) })
	w.options.Log("info", "worker_started", map[string]any{"actions": w.names()})
	w.receive(receiving, working)
	w.drain(working, end)
	w.options.Log("info", "worker_stopped", nil)
	return nil
}

func (w *Worker) every(ctx context.Context, interval time.Duration, do func()) {
	for sleep(ctx, interval); ctx.Err() == nil; sleep(ctx, interval) {
		do()
	}
}

func (w *Worker) names() []string {
	names := make([]string, 0, len(w.actions))
	for name := range w.actions {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

func (w *Worker) announce(ctx context.Context) {
	for _, name := range w.names() {
		if text, err := toText(notification("announce", map[string]any{"worker": w.options.Name, "action": name})); err == nil {
			go w.sender.send(ctx, text)
		}
	}
}

// receive takes messages while tasks that wait or run are fewer than the concurrency.
func (w *Worker) receive(receiving, working context.Context) {
	failures := 0
	for receiving.Err() == nil {
		free := w.options.Concurrency - w.underWay()
		if free <= 0 {
			select {
			case <-w.freed:
			case <-receiving.Done():
			}
			continue
		}
		if free > callEntries {
			free = callEntries
		}
		sentAt := time.Now()
		var answer struct{ Messages []queueMessage }
		err := w.queues.call(receiving, "ReceiveMessage", receiveSeconds*time.Second+callWait, map[string]any{
			"QueueUrl": w.leases.url, "MaxNumberOfMessages": free, "WaitTimeSeconds": receiveSeconds,
			"VisibilityTimeout": w.leases.seconds, "MessageAttributeNames": []string{"All"},
			"MessageSystemAttributeNames": []string{"ApproximateReceiveCount"},
		}, &answer)
		if err != nil {
			if receiving.Err() == nil {
				failures++
				w.options.Log("warning", "receive_failed", map[string]any{"reason": err.Error()})
				sleep(receiving, pause(failures))
			}
			continue
		}
		failures = 0
		// The visibility timeout began between the request and its answer.
		if late := time.Now().Add(-time.Second); len(answer.Messages) > 0 && late.After(sentAt) {
			sentAt = late
		}
		for _, message := range answer.Messages {
			w.take(receiving, working, message, sentAt)
		}
	}
}

func (w *Worker) underWay() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.attempts)
}

func (w *Worker) take(receiving, working context.Context, message queueMessage, receivedAt time.Time) {
	requests, skipped, err := requestsOf(message)
	if skipped > 0 {
		w.options.Log("error", "entries_unreadable", map[string]any{"id": message.MessageID, "entries": skipped})
	}
	if err != nil {
		// No task could be answered: SQS moves the message to the dead-letter queue after its last delivery.
		w.options.Log("error", "message_unreadable", map[string]any{"id": message.MessageID, "reason": err.Error()})
		return
	}
	held := &lease{receipt: message.ReceiptHandle, open: len(requests), until: receivedAt.Add(w.options.Visibility)}
	_, _ = fmt.Sscan(message.Attributes["ApproximateReceiveCount"], &held.received) // 0 if SQS does not say
	w.leases.add(held)
	for _, one := range requests {
		task := &Task{
			ID: one.taskID, Claim: one.claim, Action: one.Method, Tenant: one.tenant, Redelivered: held.received > 1,
			Traceparent: ownSpan(one.traceparent), Tracestate: one.tracestate, worker: w, request: one, lease: held,
		}
		task.seenAt.Store(time.Now().UnixNano())
		w.mu.Lock()
		w.attempts[task] = true
		w.mu.Unlock()
		go w.attempt(receiving, working, task)
	}
}

func (w *Worker) attempt(receiving, working context.Context, task *Task) {
	defer func() {
		w.mu.Lock()
		delete(w.attempts, task)
		w.mu.Unlock()
		notify(w.freed)
	}()
	stopped := receiving.Done()
	for isWaiting := true; isWaiting; {
		select {
		case w.slots <- struct{}{}:
			isWaiting = false
		case <-working.Done():
			return
		case <-stopped:
			if !w.leases.isBegun(task.lease) {
				return // its message is released
			}
			stopped = nil
		}
	}
	defer func() { <-w.slots }()
	if !w.leases.begin(task.lease) {
		return
	}
	if task.Redelivered {
		// So that a task that ends the process is known to have run.
		if task.progress(working, map[string]any{}) != nil {
			return
		}
	}
	text, ok := w.answer(working, task)
	if !ok {
		return
	}
	err := w.sender.send(working, text)
	var refused *refusal
	if errors.As(err, &refused) {
		// The task has run. Its steps are left out, so another attempt could run one again.
		if text, ok = w.report(task, nil, tooLarge("BadResult", "the answer cannot be sent: %s", refused), nil); ok {
			err = w.sender.send(working, text)
		}
	}
	if err == nil {
		w.leases.answered(task.lease)
	}
}

// answer runs an attempt and returns the report that ends it; false if the task is given back.
func (w *Worker) answer(working context.Context, task *Task) (text string, ok bool) {
	began := time.Now()
	defer func() {
		// A method of what the handler has returned: MarshalJSON, or Error of a typed nil.
		if value := recover(); value != nil && !w.ended.Load() {
			text, ok = w.report(task, nil, panicked(value), task.steps.entries())
		}
		if _, known := w.actions[task.Action]; ok && known {
			w.sender.ran(cut(task.Action, 200), time.Since(began))
		}
	}()
	result, err := w.outcome(working, task)
	if w.ended.Load() || errors.Is(err, errStopped) {
		return "", false
	}
	return w.report(task, result, err, task.steps.entries())
}

// report is the text that ends an attempt; false if it cannot be written.
func (w *Worker) report(task *Task, result json.RawMessage, err error, entries []stepEntry) (string, bool) {
	report := map[string]any{"jsonrpc": "2.0", "id": task.request.ID}
	var suspended *suspension
	switch {
	case errors.As(err, &suspended):
		suspended.params["id"] = task.request.ID
		report = notification(suspended.method, suspended.params)
		if suspended.entry != nil {
			entries = append(entries, *suspended.entry)
		}
	case err != nil:
		failed := errorOf(err, w.actions[task.Action].maxAttempts)
		w.options.Log("warning", "task_failed", map[string]any{"task_id": task.ID, "action": task.Action, "error": failed.Message})
		report["error"] = failed
	default:
		report["result"] = result
	}
	if task.Traceparent != "" {
		report["traceparent"] = task.Traceparent
		if task.Tracestate != "" {
			report["tracestate"] = task.Tracestate
		}
	}
	if len(entries) > 0 {
		report["steps"] = entries
	}
	text, err := toText(report)
	if err != nil {
		w.options.Log("error", "answer_unwritable", map[string]any{"task_id": task.ID, "reason": err.Error()})
	}
	return text, err == nil
}

// outcome is the result of an attempt as JSON, or its error.
func (w *Worker) outcome(working context.Context, task *Task) (json.RawMessage, error) {
	found, ok := w.actions[task.Action]
	if !ok {
		message := "no handler registered for action " + task.Action
		return nil, &failure{kind: "UnknownAction", message: message, code: codeMethodNotFound}
	}
	params, err := w.keys.open(task.request.Params, payloadOwner(task.Action, task.Tenant))
	if err != nil {
		return nil, err
	}
	journalBytes := sizeOf(task.request.Journal...) // as it is kept
	for at := range task.request.Journal {
		entry := &task.request.Journal[at]
		owner := stepOwner(task.ID, entry.Name, entry.Repetition)
		if entry.Result, err = w.keys.open(entry.Result, owner); err != nil {
			return nil, err
		}
		if entry.Error, err = w.keys.open(entry.Error, owner); err != nil {
			return nil, err
		}
	}
	limit := task.request.limit
	orElse(&limit, found.timeout)
	orElse(&limit, w.options.TaskTimeout)
	ctx, cancel := context.WithTimeout(context.WithValue(working, taskKey{}, task), limit)
	defer cancel()
	task.steps = &steps{
		journal: task.request.Journal, repetitions: map[string]int{},
		check:       func(hasReported bool) error { return w.checkStep(ctx, task, hasReported) },
		report:      func(entry stepEntry) error { return w.reportStep(working, task, entry) },
		resultLimit: w.options.ResultLimit, limit: w.options.StepsLimit, most: w.options.StepsMost,
		bytes: journalBytes, sealed: w.keys.sealedBytes,
	}
	result, err := within(ctx, func() (any, error) { return found.run(ctx, params) })
	err = task.steps.outcome(err)
	if w.ended.Load() {
		return nil, errStopped
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
		return nil, &failure{kind: "TaskTimeout", message: fmt.Sprintf("not finished after %s", limit), code: codeTimeout}
	}
	if err != nil {
		return nil, err
	}
	return w.resultText(result)
}

func (w *Worker) resultText(result any) (json.RawMessage, error) {
	text, err := toText(result)
	if err != nil {
		message := "the result cannot be written as JSON: " + err.Error()
		return nil, &failure{kind: "BadResult", message: message, data: map[string]any{"final": true}}
	}
	if len(text) > w.options.ResultLimit || len(text) > messageLimit {
		return nil, tooLarge("BadResult", "the result has %d bytes, PENSTOCK_RESULT_LIMIT_BYTES is %d", len(text), w.options.ResultLimit)
	}
	return json.RawMessage(text), nil
}

// within returns what the handler returns, a panic as an error, or the error of ctx; the handler may go on then.
func within(ctx context.Context, run func() (any, error)) (any, error) {
	type outcome struct {
		result any
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		returned := false
		defer func() {
			if returned {
				return
			}
			done <- outcome{err: panicked(recover())}
		}()
		result, err := run()
		returned = true
		done <- outcome{result, err}
	}()
	select {
	case found := <-done:
		return found.result, found.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// checkStep returns why no step may begin, nil if one may.
func (w *Worker) checkStep(ctx context.Context, task *Task, hasReported bool) error {
	if w.ended.Load() {
		return errStopped
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// Another worker may have had the message, and its steps may not be in the journal.
	if !w.leases.holds(task.lease) || task.Redelivered && !hasReported {
		return &suspension{method: "suspend", params: map[string]any{"redelivered": true}}
	}
	return nil
}

func (w *Worker) reportStep(ctx context.Context, task *Task, entry stepEntry) error {
	text, err := toText(struct {
		JSONRPC string `json:"jsonrpc"`
		Method  string `json:"method"`
		Params  any    `json:"params"`
	}{"2.0", "step", struct {
		ID string `json:"id"`
		stepEntry
	}{task.request.ID, entry}})
	if err != nil {
		return err
	}
	err = w.sender.send(ctx, text)
	var refused *refusal
	if errors.As(err, &refused) {
		return tooLarge("BadResult", "the report of step %s cannot be sent: %s", entry.label(), refused)
	}
	return err
}

func (w *Worker) heartbeat(ctx context.Context) {
	due := time.Now().Add(-w.options.Heartbeat * 8 / 10).UnixNano()
	w.mu.Lock()
	defer w.mu.Unlock()
	for task := range w.attempts {
		if task.seenAt.Load() < due && w.leases.isBegun(task.lease) && task.beating.CompareAndSwap(false, true) {
			go func(task *Task) {
				defer task.beating.Store(false)
				_ = task.progress(ctx, map[string]any{}) // only ctx ends it
			}(task)
		}
	}
}

// drain finishes what has begun within the grace period and gives back the rest.
func (w *Worker) drain(working context.Context, end context.CancelFunc) {
	deadline := time.Now().Add(w.options.Grace)
	last := lastWait
	if last > w.options.Grace/2 {
		last = w.options.Grace / 2
	}
	giving, cancel := context.WithDeadline(working, deadline)
	defer cancel()
	w.leases.release(giving, func(one *lease) bool { return !one.begun })
	for w.underWay() > 0 && time.Until(deadline) > last {
		select {
		case <-w.freed:
		case <-time.After(time.Until(deadline) - last):
		}
	}
	w.ended.Store(true)
	if given := w.leases.release(giving, func(*lease) bool { return true }); given > 0 {
		w.options.Log("warning", "messages_given_back", map[string]any{"messages": given})
	}
	for w.leases.left() > 0 && time.Now().Before(deadline) {
		sleep(working, linger)
	}
	end()
}
