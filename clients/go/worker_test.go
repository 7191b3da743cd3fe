package penstock

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
)

func silent(string, string, map[string]any) {}

func workerOf(t *testing.T) *Worker {
	worker, err := New(Options{OutboundQueue: "out", ResultsQueue: "in", Region: "eu-west-1", ResultLimit: 20, Log: silent})
	if err != nil {
		t.Fatal(err)
	}
	return worker
}

func taskOf(worker *Worker, params string) *Task {
	held := &lease{open: 1, received: 1, until: time.Now().Add(time.Hour)}
	one := request{ID: "7:2:abc", Method: "mail", Params: json.RawMessage(params)}
	return &Task{ID: "7", Claim: "2", Action: "mail", worker: worker, request: one, lease: held}
}

// failed returns the error with which an attempt is answered.
func failed(t *testing.T, worker *Worker, params string) errorObject {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	text, ok := worker.answer(ctx, taskOf(worker, params))
	var answer struct {
		ID    string
		Error *errorObject
	}
	if err := json.Unmarshal([]byte(text), &answer); !ok || err != nil || answer.ID != "7:2:abc" || answer.Error == nil {
		t.Fatal(text, ok, err)
	}
	return *answer.Error
}

func TestErrorsHaveTheCodesAndHintsOfTheProtocol(t *testing.T) {
	for _, one := range []struct {
		handler func(ctx context.Context, n int) (any, error)
		params  string
		code    int
		hint    string
		value   any
	}{
		{func(context.Context, int) (any, error) { return nil, Fail("no") }, "1", -32000, "final", true},
		{func(context.Context, int) (any, error) { return nil, Retry(time.Minute, "no") }, "1", -32000, "retry_after", 60.0},
		{func(context.Context, int) (any, error) { return nil, errors.New("no") }, "1", -32000, "max_attempts", 3.0},
		{func(context.Context, int) (any, error) { panic("no") }, "1", -32000, "type", "panic"},
		{func(context.Context, int) (any, error) { return 1, nil }, `"x"`, -32602, "type", "BadParams"},
		{func(context.Context, int) (any, error) { return strings.Repeat("x", 19), nil }, "1", -32013, "final", true},
		{func(context.Context, int) (any, error) { return func() {}, nil }, "1", -32000, "type", "BadResult"},
		{func(ctx context.Context, _ int) (any, error) { <-ctx.Done(); return nil, ctx.Err() }, "1", -32001, "type", "TaskTimeout"},
		{func(context.Context, int) (any, error) { return 1, nil }, `"penstock+object:a:-:1:b"`, -32000, "not_begun", true},
		{func(context.Context, int) (any, error) { return 1, nil }, `"penstock+sealed:0123456789abcdef:AAAA"`, -32000, "not_begun", true},
	} {
		worker := workerOf(t)
		Handle(worker, "mail", one.handler, MaxAttempts(3), Timeout(50*time.Millisecond))
		if found := failed(t, worker, one.params); found.Code != one.code || found.Data[one.hint] != one.value || found.Message == "" {
			t.Errorf("%+v instead of %d, %s %v", found, one.code, one.hint, one.value)
		}
	}
	if found := failed(t, workerOf(t), "1"); found.Code != -32601 {
		t.Errorf("%+v", found)
	}
}

type cardError struct{ text string }

func (e *cardError) Error() string { return e.text }

type loud struct{}

func (loud) MarshalJSON() ([]byte, error) { panic("no") }

func TestWhatPanicsWhenItIsReadFailsItsAttemptAlone(t *testing.T) {
	for _, handler := range []func(context.Context, int) (any, error){
		func(context.Context, int) (any, error) { var none *cardError; return 1, none },
		func(context.Context, int) (any, error) { return loud{}, nil },
		func(ctx context.Context, _ int) (any, error) {
			return Step(ctx, "charge", func(context.Context) (loud, error) { return loud{}, nil })
		},
	} {
		worker := workerOf(t)
		Handle(worker, "mail", handler)
		if found := failed(t, worker, "1"); found.Data["type"] != "panic" || found.Data["traceback"] == nil {
			t.Errorf("%+v", found)
		}
	}
}

func TestAStepsNameIsOneThatTheResulterTakes(t *testing.T) {
	for _, name := range []string{"", strings.Repeat("x", 201), "a\nb", "a\x00", "a\u2028b", "a\xffb"} {
		worker := workerOf(t)
		ran := false
		Handle(worker, "mail", func(ctx context.Context, _ int) (any, error) {
			return Step(ctx, name, func(context.Context) (int, error) { ran = true; return 1, nil })
		})
		if found := failed(t, worker, "1"); ran || !strings.Contains(found.Message, "1 to 200 printable characters") {
			t.Errorf("%q: %+v", name, found)
		}
	}
	if err := checkStepName(strings.Repeat("ü", 199) + " "); err != nil {
		t.Error(err)
	}
}

func TestResultsOfStepsAreLimitedAloneAndTogether(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for _, one := range []struct {
		size int
		kind string
	}{{30, "BadResult"}, {15, "JournalTooLarge"}} {
		worker := workerOf(t) // results of 20 bytes
		worker.options.StepsLimit = 100
		Handle(worker, "mail", func(ctx context.Context, _ int) (any, error) {
			for _, name := range []string{"one", "two"} {
				_, _ = Step(ctx, name, func(context.Context) (string, error) { return strings.Repeat("<", one.size), nil })
			}
			return 1, nil // the limit counts all the same
		})
		task := taskOf(worker, "1")
		task.request.Journal = []stepEntry{{Name: "one", Result: json.RawMessage(`"` + strings.Repeat("x", 30) + `"`)}}
		text, ok := worker.answer(ctx, task)
		if !ok || !strings.Contains(text, one.kind) || !strings.Contains(text, `"final":true`) || strings.Contains(text, `"steps"`) {
			t.Error(text, ok)
		}
	}
}

func TestAVisibilityTimeoutThatHasEndedOnceStaysLost(t *testing.T) {
	worker := workerOf(t)
	held := &lease{until: time.Now().Add(-time.Second)}
	if worker.leases.holds(held) {
		t.Error("it is held")
	}
	held.until = time.Now().Add(time.Hour)
	if worker.leases.holds(held) {
		t.Error("it is held again")
	}
}

func TestNoStepBeginsWhenTheLeaseIsLostOrTheTaskWasRedelivered(t *testing.T) {
	for _, change := range []func(*Task){
		func(task *Task) { task.lease.until = time.Now().Add(-time.Second) },
		func(task *Task) { task.Redelivered = true },
	} {
		worker := workerOf(t)
		began := false
		Handle(worker, "mail", func(ctx context.Context, _ int) (any, error) {
			_, _ = Step(ctx, "charge", func(context.Context) (int, error) { began = true; return 1, nil })
			return 1, nil // the suspension counts all the same
		})
		task := taskOf(worker, "1")
		change(task)
		text, ok := worker.answer(context.Background(), task)
		if want := `{"jsonrpc":"2.0","method":"suspend","params":{"id":"7:2:abc","redelivered":true}}`; !ok || text != want || began {
			t.Error(text, ok, began)
		}
	}
}

func TestStepsOfTheJournalAreReplayedAndASleepSuspends(t *testing.T) {
	worker := workerOf(t)
	Handle(worker, "mail", func(ctx context.Context, _ int) (any, error) {
		charge, err := Step(ctx, "charge", func(context.Context) (int, error) { return 0, errors.New("it ran again") })
		if err != nil {
			return nil, err
		}
		if err := Sleep(ctx, 2*time.Second); err != nil {
			return nil, err
		}
		answer, err := Event[string](ctx, "token", time.Minute)
		return map[string]any{"c": charge, "a": answer}, err
	})
	journal := []stepEntry{{Name: "charge", Result: json.RawMessage("7")}}
	for _, one := range []struct{ added, want string }{
		{"", `{"jsonrpc":"2.0","method":"suspend","params":{"id":"7:2:abc","seconds":2},` +
			`"steps":[{"name":"ctx.sleep","position":1,"result":null}]}`},
		{sleepStep, `{"jsonrpc":"2.0","method":"wait","params":{"id":"7:2:abc","step":{"name":"ctx.event","position":2,` +
			`"repetition":0},"timeout":60,"token":"token"}}`},
		{eventStep, `{"id":"7:2:abc","jsonrpc":"2.0","result":{"a":"yes","c":7}}`},
	} {
		if one.added != "" {
			journal = append(journal, stepEntry{Name: one.added, Position: len(journal), Result: json.RawMessage(`"yes"`)})
		}
		task := taskOf(worker, "1")
		task.request.Journal = append([]stepEntry(nil), journal...)
		if text, ok := worker.answer(context.Background(), task); !ok || text != one.want {
			t.Error(text, ok)
		}
	}
	task := taskOf(worker, "1")
	task.request.Journal = []stepEntry{{Name: "pay", Result: json.RawMessage("7")}}
	if text, _ := worker.answer(context.Background(), task); !strings.Contains(text, "StepChanged") {
		t.Error(text)
	}
	failure := errorOf(Fail("no card"), 0)
	data, _ := json.Marshal(failure) // it is plain
	task = taskOf(worker, "1")
	task.request.Journal = []stepEntry{{Name: "charge", Error: data}}
	if text, _ := worker.answer(context.Background(), task); !strings.Contains(text, "StepFailed") || !strings.Contains(text, "no card") {
		t.Error(text)
	}
}

func TestEntriesArePackedWithinTheLimitsOfSQS(t *testing.T) {
	var entries []pending
	for size := 1000; size < 400_000; size += 9_000 {
		entries = append(entries, pending{text: strings.Repeat("x", size)})
	}
	packed := 0
	for _, call := range calls(pack(entries)) {
		bytes := 0
		for _, message := range call {
			packed += len(message)
			bytes += len(bodyOf(message))
		}
		if len(call) > callEntries || bytes > 1<<20 {
			t.Error(len(call), bytes)
		}
	}
	if packed != len(entries) {
		t.Error(packed, len(entries))
	}
}

func TestSettingsAreCheckedAndKeysAreNotShown(t *testing.T) {
	if _, err := New(Options{OutboundQueue: "out", ResultsQueue: "in"}); err == nil || !strings.Contains(err.Error(), "AWS_REGION") {
		t.Error(err)
	}
	t.Setenv("PENSTOCK_HEARTBEAT_SECONDS", "often")
	if _, err := FromEnvironment(); err == nil || !strings.Contains(err.Error(), `PENSTOCK_HEARTBEAT_SECONDS is "often"`) {
		t.Error(err)
	}
	_, err := New(Options{OutboundQueue: "out", ResultsQueue: "in", Region: "r", PayloadKeys: []string{"hush"}})
	if err == nil || strings.Contains(err.Error(), "hush") {
		t.Error(err)
	}
}

func TestASleepThatIsOverSuspendsForNoTime(t *testing.T) {
	worker := workerOf(t)
	Handle(worker, "mail", func(ctx context.Context, _ int) (any, error) { return nil, Sleep(ctx, -time.Second) })
	if text, ok := worker.answer(context.Background(), taskOf(worker, "1")); !ok || !strings.Contains(text, `"seconds":0`) {
		t.Error(text, ok)
	}
}

func TestATaskHasSoManyStepsAndNoMore(t *testing.T) {
	worker := workerOf(t)
	worker.options.StepsMost = 2
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	Handle(worker, "mail", func(ctx context.Context, _ int) (any, error) {
		for _, name := range []string{"one", "two", "three"} {
			if _, err := Step(ctx, name, func(context.Context) (int, error) { return 1, nil }); err != nil {
				return nil, err
			}
		}
		return nil, nil
	})
	task := taskOf(worker, "1")
	task.request.Journal = []stepEntry{
		{Name: "one", Result: json.RawMessage("1")}, {Name: "two", Position: 1, Result: json.RawMessage("1")},
	}
	text, ok := worker.answer(ctx, task)
	if !ok || !strings.Contains(text, "TooManySteps") || !strings.Contains(text, `"final":true`) {
		t.Error(text, ok)
	}
}

func TestATaskWithoutAHandlerIsNoRunTime(t *testing.T) {
	worker := workerOf(t)
	failed(t, worker, "1")
	if len(worker.sender.runTimes) != 0 {
		t.Error(worker.sender.runTimes)
	}
}

func TestStepsAreCountedAsThePipelineKeepsThem(t *testing.T) {
	keys, err := newPayloadKeys([]string{base64.StdEncoding.EncodeToString(make([]byte, 32))})
	if err != nil {
		t.Fatal(err)
	}
	if keys.sealedBytes(300) < 400 || (payloadKeys{}).sealedBytes(300) != 300 {
		t.Error(keys.sealedBytes(300))
	}
}
