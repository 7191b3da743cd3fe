package penstock

import (
	"reflect"
	"testing"
	"time"
)

func text(value string) attribute { return attribute{"String", value} }

func TestAMessageIsReadWithItsAttributes(t *testing.T) {
	found, skipped, err := requestsOf(queueMessage{
		Body: ` [{"jsonrpc":"2.0","method":"export","params":{"n":12345678901234567890},"id":"7:2:abc",
			"steps":[{"name":"charge","position":1,"result":null}]},
			{"jsonrpc":"2.0","method":"mail","id":"8:1"}, {"id":"x"}, 5]`,
		MessageAttributes: map[string]attribute{
			"tenants":         text(`{"acme":[7],"other":["9"]}`),
			"traces":          text(`[{"traceparent":"00-a","tracestate":"b=c","tasks":[8]}]`),
			"timeout_seconds": text("1.5"),
		},
	})
	if err != nil || skipped != 2 || len(found) != 2 {
		t.Fatal(found, skipped, err)
	}
	first, second := found[0], found[1]
	if first.ID != "7:2:abc" || first.taskID != "7" || first.claim != "2" || string(first.Params) != `{"n":12345678901234567890}` {
		t.Errorf("%+v", first)
	}
	if first.Journal[0].Name != "charge" || first.Journal[0].Position != 1 || string(first.Journal[0].Result) != "null" {
		t.Errorf("%+v", first.Journal)
	}
	if first.tenant != "acme" || second.tenant != "" || first.traceparent != "" || second.traceparent != "00-a" {
		t.Errorf("%+v %+v", first, second)
	}
	if second.tracestate != "b=c" || second.limit != 1500*time.Millisecond || string(second.Params) != "{}" {
		t.Errorf("%+v", second)
	}
}

func TestAMessageOfOneTaskAndOneTenant(t *testing.T) {
	found, _, err := requestsOf(queueMessage{
		Body:              `{"jsonrpc":"2.0","method":"mail","params":[1],"id":"8:1"}`,
		MessageAttributes: map[string]attribute{"tenant": text(`"acmé"`), "traceparent": text("00-a")},
	})
	if err != nil || len(found) != 1 || found[0].tenant != "acmé" || found[0].traceparent != "00-a" || found[0].limit != 0 {
		t.Error(found, err)
	}
}

func TestAMessageWithoutATaskIsAnError(t *testing.T) {
	task := `{"method":"mail","id":"8:1"}`
	for _, message := range []queueMessage{
		{Body: "{"}, {Body: ""}, {Body: "[]"}, {Body: "7"}, {Body: `{"method":"mail","id":8}`}, {Body: `{"method":"mail","id":"8"}`},
		{Body: task, MessageAttributes: map[string]attribute{"tenant": text("acme")}},
		{Body: task, MessageAttributes: map[string]attribute{"tenants": text(`{"acme":7}`)}},
	} {
		if found, _, err := requestsOf(message); err == nil {
			t.Errorf("%+v is %+v", message, found)
		}
	}
}

func TestAnOwnSpanIsOfTheTrace(t *testing.T) {
	parent := "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	span := ownSpan(parent)
	if len(span) != len(parent) || span == parent || span[:36] != parent[:36] || span[52:] != "-01" {
		t.Error(span)
	}
	if ownSpan("") != "" || ownSpan("00-short") != "" {
		t.Error("a span of no trace")
	}
}

func TestParametersByNameAndByPosition(t *testing.T) {
	type params struct {
		Order   int    `json:"order"`
		Skipped string `json:"-"`
		To      string `json:"to"`
	}
	for _, given := range []string{`{"order":4,"to":"ann"}`, `[4,"ann"]`} {
		var found params
		if err := readParams([]byte(given), &found); err != nil || found != (params{Order: 4, To: "ann"}) {
			t.Error(given, found, err)
		}
	}
	for _, given := range []string{`[4,"ann",1]`, `["four"]`, `{"order":"four"}`} {
		if err := readParams([]byte(given), &params{}); err == nil {
			t.Error(given)
		}
	}
	var list []int
	if err := readParams([]byte(`[1,2]`), &list); err != nil || !reflect.DeepEqual(list, []int{1, 2}) {
		t.Error(list, err)
	}
}

func TestTextHasNoCharacterThatSQSRefuses(t *testing.T) {
	found, err := toText(map[string]string{"a": "<é\ufffe\uffff>"})
	if err != nil || found != "{\"a\":\"<é\\ufffe\\uffff>\"}" {
		t.Error(found, err)
	}
}
